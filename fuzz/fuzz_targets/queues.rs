//! A client writes arbitrary words to its arena, and must not affect a pair of other clients.
#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use rnic_abi::abi::queue::{SendFlags, SendHeader};
use rnic_abi::types::{QpState, Stag};
use rnic_core::engine::EngineCommand;
use rnic_core::stream::startup::Role;
use rnic_fuzz::{IOVA, Input, QP_BELL, Receiving, SRQ_BELL, World, negotiated, stag};

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    // Clients 0 and 1 are honest. Client 2 is hostile, and connected by TCP, or to client 3.
    let how = input.u8();
    let receiving = match how >> 1 & 3 {
        0 => Receiving::Shared,
        1 => Receiving::SharedAndHeld,
        _ => Receiving::Own,
    };
    let mut w = World::receiving(4, receiving);
    w.attach_direct(0, 1);
    if how & 1 == 0 {
        w.attach_tcp(2, negotiated(Role::Initiator { rtr: None }, true, false));
    } else {
        w.attach_direct(2, 3);
    }
    let words = w.clients[2].used / 8;
    while !input.is_empty() {
        match input.u8() % 9 {
            // Stores an arbitrary word (or a small number, in the next arm) at an arbitrary place.
            0 | 1 => {
                let at = usize::from(input.u16()) % words;
                let word = input.u64();
                w.clients[2].arena.store_u64(at * 8, word).expect("inside");
            }
            2 => {
                let at = usize::from(input.u16()) % words;
                let word = u64::from(input.u8());
                w.clients[2].arena.store_u64(at * 8, word).expect("inside");
            }
            3 | 4 => w.clients[2].post(&mut input, 3, 2),
            5 => {
                let bell = u32::from(input.u16());
                w.ring(2, bell);
            }
            6 => {
                w.ring(2, QP_BELL);
                w.ring(2, SRQ_BELL);
                w.settle();
            }
            7 => {
                w.set_faults(2, &mut input);
                w.advance(Duration::from_millis(input.u8().into()));
            }
            _ => {
                while w.clients[2].cq.poll().is_some() && input.u8() != 0 {}
                let _ = w.clients[2].cq.release();
                let stag = Stag(stag(2).0 + u32::from(input.u8()) % 8);
                w.command(EngineCommand::RevokeStag(stag));
            }
        }
    }
    w.settle();
    w.advance(Duration::from_secs(3));
    // The honest pair is unaffected.
    assert_eq!(w.clients[0].shared.state(), QpState::Rts);
    let header = SendHeader {
        opcode: 0,
        num_sge: 0,
        flags: (SendFlags::INLINE | SendFlags::SIGNALED).bits(),
        inline_len: 0,
        wr_id: 7,
        remote_addr: IOVA,
        rkey: stag(1).0,
        inv_rkey: 0,
        params: [0; 4],
        reserved_is_zero: true,
    };
    w.clients[0].sq.push(&header, &[], b"honestly").expect("room");
    w.clients[0].sq.publish();
    w.ring(0, QP_BELL);
    w.settle();
    assert_eq!(w.clients[0].cq.poll().map(|c| (c.wr_id, c.status)), Some((7, 0)));
    let mut bytes = [0; 8];
    w.clients[1].memory.read(0, &mut bytes).expect("inside");
    assert_eq!(&bytes, b"honestly");
});
