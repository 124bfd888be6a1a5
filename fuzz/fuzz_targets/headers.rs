//! DDP and RDMAP headers: what was read is what would be written, as far as anybody looks at it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rnic_core::ddp::Header;
use rnic_core::rdmap::{Control, Layout, ReadRequest, Terminate};
use rnic_core::stream::{Fault, terminate};
use rnic_core::types::TerminateCode;

fuzz_target!(|data: &[u8]| {
    if let Ok((header, payload)) = Header::parse(data) {
        let mut octets = [0xEE; 18];
        let len = header.emit(&mut octets);
        assert_eq!(len, header.len());
        assert_eq!(len + payload.len(), data.len());
        assert_eq!(Header::parse(&octets[..len]).map(|(h, _)| h), Ok(header));
        let _ = header.to_string();
    }
    if let Some(octet) = data.first() {
        assert_eq!(Control::parse(*octet).octet(), octet & !0x30);
    }
    if let Some(octets) = data.first_chunk() {
        let request = ReadRequest::parse(octets);
        assert_eq!(request.emit(), *octets);
        let _ = request.advanced(u32::MAX);
    }
    if let Ok(t) = Terminate::parse(data) {
        let octets = t.to_vec();
        assert!(octets.len() <= Terminate::MAX_LEN && octets.len() == t.buffer_len());
        let again = Terminate::parse(&octets).expect("what we write can be read");
        if t.layout == Layout::Rfc5040 {
            assert_eq!(again, t);
        }
        let _ = t.to_string();
    }
    let code = TerminateCode { layer: 0, etype: 1, code: 0 };
    for fault in [Fault::TOO_SHORT, Fault::local(code), Fault::segment(code), Fault::read(code)] {
        let octets = terminate::build(fault, data, None);
        assert!(octets.len() <= Terminate::MAX_LEN);
        Terminate::parse(&octets).expect("what we write can be read");
    }
});
