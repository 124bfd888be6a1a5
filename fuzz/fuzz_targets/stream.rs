//! A connected QP posts requests while its peer sends arbitrary bytes, split at arbitrary points.
#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use rnic_abi::abi::control::DisconnectMode;
use rnic_abi::abi::queue::Sge;
use rnic_abi::types::{Msn, QpState, Stag, TaggedOffset};
use rnic_core::ddp::{Header, TaggedHeader, UntaggedHeader};
use rnic_core::engine::EngineCommand;
use rnic_core::mpa::Framer;
use rnic_core::mpa::startup::RtrKinds;
use rnic_core::stream::startup::Role;
use rnic_fuzz::{IOVA, Input, REGION, World, negotiated, stag};

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let bits = input.u8();
    let role = match bits & 3 {
        0 => Role::Initiator { rtr: None },
        1 => Role::Responder { await_rtr: None },
        _ => Role::Responder { await_rtr: Some(RtrKinds::all()) },
    };
    let markers = bits & 4 != 0;
    let mut w = World::new(1);
    w.attach_tcp(0, negotiated(role, false, markers));
    let mut framer = Framer::new(markers, false);
    let qp = w.clients[0].qp;
    for n in 0..6 {
        let sge = Sge { addr: IOVA + n * 64, length: 64, lkey: stag(0).0 };
        w.clients[0].rq.push(n, &[sge]).expect("eight fit");
    }
    w.clients[0].rq.publish();
    while !input.is_empty() {
        match input.u8() % 8 {
            // Arbitrary bytes.
            0 => {
                let n = usize::from(input.u8());
                let bytes = input.take(n);
                w.receive(qp, bytes);
            }
            // Segments that are almost valid.
            1..=3 => {
                let header = header(&mut input);
                let mut ulpdu = vec![0; 18];
                let len = header.emit(&mut ulpdu);
                ulpdu.truncate(len);
                let n = usize::from(input.u8());
                ulpdu.extend_from_slice(input.take(n));
                let mut out = vec![0; framer.fpdu_len(ulpdu.len())];
                let framed = framer.frame(&mut out, &ulpdu, 0, |_, _| Ok::<_, ()>(()));
                assert_eq!(framed, Ok(out.len()));
                let cut = usize::from(input.u8()).min(out.len());
                w.receive(qp, &out[..cut]);
                w.receive(qp, &out[cut..]);
            }
            4 | 5 => {
                w.clients[0].post(&mut input, 0, 0);
                w.ring(0, rnic_fuzz::QP_BELL);
                w.settle();
            }
            6 => {
                while w.clients[0].cq.poll().is_some() {}
                if w.clients[0].cq.release() != 0 {
                    w.ring(0, rnic_fuzz::CQ_BELL);
                }
                w.settle();
            }
            _ => match input.u8() % 9 {
                7 => w.set_faults(0, &mut input),
                8 => w.advance(Duration::from_millis(input.u8().into())),
                0 => {
                    let stag = Stag(stag(0).0 + u32::from(input.u8()) % 3);
                    w.command(EngineCommand::RevokeStag(stag));
                }
                1 => w.command(EngineCommand::Disconnect(qp, DisconnectMode::Orderly)),
                2 => {
                    w.engine.receive(qp, w.now, |_| Ok(0));
                }
                3 => w.transmit(qp, usize::from(input.u8())),
                4 => {
                    let mode = DisconnectMode::OrderlyWithin { ms: input.u8().into() };
                    w.command(EngineCommand::Disconnect(qp, mode));
                }
                5 => w.engine.handle_peer_closing(qp, w.now),
                _ => w.engine.handle_writable(qp),
            },
        }
        let (unread, reserved, _) = w.clients[0].shared_cq.usage();
        assert!(unread + reserved <= 16);
    }
    // Whatever the input, the QP must reach Error within its deadlines.
    w.clear_faults(0);
    w.command(EngineCommand::Disconnect(qp, DisconnectMode::Orderly));
    for _ in 0..4 {
        while w.clients[0].cq.poll().is_some() {}
        if w.clients[0].cq.release() != 0 {
            w.ring(0, rnic_fuzz::CQ_BELL);
        }
        w.settle();
        w.advance(Duration::from_secs(2));
    }
    assert_eq!(w.clients[0].shared.state(), QpState::Error);
    assert!(w.closed);
    assert_eq!(w.clients[0].shared_cq.usage().1, 0, "a CQ slot is still reserved");
});

/// Returns a header whose fields are mostly valid.
fn header(input: &mut Input<'_>) -> Header {
    let bits = input.u8();
    let last = bits & 1 != 0;
    let dv = if bits & 0x80 == 0 { 1 } else { bits >> 5 & 3 };
    let rsvd_ulp = input.u8() % 16 | 0x40;
    let near = |input: &mut Input<'_>| match input.u8() % 4 {
        0 => u64::from(input.u16()),
        n => u64::from(n) * 64,
    };
    if bits & 2 != 0 {
        let stag = Stag(stag(0).0 + u32::from(input.u8()) % 4);
        let to = match input.u8() {
            0 => input.u64(),
            n => IOVA + u64::from(n) * 16 % REGION as u64,
        };
        Header::Tagged(TaggedHeader { last, dv, rsvd_ulp, stag, to: TaggedOffset(to) })
    } else {
        Header::Untagged(UntaggedHeader {
            last,
            dv,
            rsvd_ulp,
            inv_stag: Stag(stag(0).0 + u32::from(input.u8()) % 3),
            qn: u32::from(input.u8()) % 4,
            msn: Msn(u32::from(input.u8()) % 8),
            mo: if bits & 4 != 0 { 0 } else { near(input) as u32 },
        })
    }
}
