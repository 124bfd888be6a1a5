//! Both start-up state machines with the input as a whole and split at one point. The result must
//! not depend on the split.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rnic_core::mpa::startup::RtrKinds;
use rnic_core::stream::startup::{
    Initiator, InitiatorStep, Options, Responder, ResponderStep, StartupError,
};
use rnic_fuzz::Input;

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let bits = input.u8();
    let kinds = input.u8();
    let options = Options {
        revision: 1 + (bits & 1),
        crc: bits & 2 != 0,
        markers: bits & 4 != 0,
        rdmac: bits & 8 != 0,
        peer_to_peer: bits & 16 != 0,
        ird: u16::from(kinds >> 4),
        ord: u16::from(kinds >> 4),
        rtr: RtrKinds::from_bits_truncate(kinds & 7),
    };
    let cut = usize::from(input.u16());
    let bytes = input.0;
    let (head, tail) = bytes.split_at(cut.min(bytes.len()));
    if bits & 32 == 0 {
        let run = |parts: &[&[u8]]| -> Result<Option<InitiatorStep>, StartupError> {
            let mut machine = Initiator::new(&options, b"private").expect("short enough");
            let mut after = Vec::new();
            let mut done = None;
            for part in parts {
                if done.is_some() {
                    after.extend_from_slice(part);
                    continue;
                }
                match machine.handle_input(part)? {
                    InitiatorStep::NeedMore => {}
                    step => done = Some(step),
                }
            }
            if let Some(InitiatorStep::Accepted(n)) = &mut done {
                n.leftover.extend(after);
                assert!(
                    n.ord <= n.peer_ird.unwrap_or(u16::MAX) && n.ird >= n.peer_ord.unwrap_or(0)
                );
            }
            Ok(done)
        };
        // The kind of the error may depend on the bytes received so far.
        assert_eq!(run(&[bytes]).ok(), run(&[head, tail]).ok());
    } else {
        let mut whole = Responder::new(&options);
        let mut cut = Responder::new(&options);
        let first = whole.handle_input(bytes);
        let second = match cut.handle_input(head) {
            Ok(ResponderStep::NeedMore) => cut.handle_input(tail),
            // The request ended before the split. Bytes after it are an error, whole or split.
            Ok(step) if tail.is_empty() => Ok(step),
            Ok(_) => cut.handle_input(tail),
            Err(e) => Err(e),
        };
        assert_eq!(first.as_ref().ok(), second.as_ref().ok());
        if let Ok(ResponderStep::Request(_)) = first {
            let (reply, n) = whole.accept(None, None, 8, 8, b"answer").expect("short enough");
            assert!(reply.len() >= 20 && n.ord <= n.peer_ird.unwrap_or(u16::MAX));
        }
    }
});
