//! The deframer with arbitrary bytes, and with FPDUs framed from arbitrary ULPDUs.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rnic_core::mpa::{Deframer, Framer, MAX_FPDU};
use rnic_fuzz::Input;

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let bits = input.u8();
    let markers = bits & 1 != 0;
    let crc = bits & 2 != 0;
    let mut deframer = Deframer::new(markers, crc);
    if bits & 4 == 0 {
        let mut have = input.0.to_vec();
        loop {
            let needed = deframer.needed(&have);
            assert!(needed > 0 && needed <= MAX_FPDU);
            if needed > have.len() {
                return;
            }
            let mut fpdu: Vec<u8> = have.drain(..needed).collect();
            let max = fpdu.len();
            match deframer.take(&mut fpdu) {
                Ok(ulpdu) => assert!(ulpdu.len() < max),
                Err(_) => return,
            }
        }
    }
    let mut framer = Framer::new(markers, crc);
    while !input.is_empty() {
        let header = usize::from(input.u8() % 20);
        let len = usize::from(input.u16());
        let header = input.take(header).to_vec();
        let payload: Vec<u8> = (0..len.min(60_000)).map(|i| (i * 7) as u8).collect();
        let ulpdu_len = header.len() + payload.len();
        let mut out = vec![0xEE; framer.fpdu_len(ulpdu_len)];
        let framed = framer.frame(&mut out, &header, payload.len(), |at, block| {
            block.copy_from_slice(&payload[at..at + block.len()]);
            Ok::<_, ()>(())
        });
        assert_eq!(framed, Ok(out.len()));
        for have in 0..out.len().min(8) {
            assert!(deframer.needed(&out[..have]) > have);
        }
        assert_eq!(deframer.needed(&out), out.len());
        let ulpdu = deframer.take(&mut out).expect("framed above");
        assert_eq!(ulpdu, [header, payload].concat());
    }
});
