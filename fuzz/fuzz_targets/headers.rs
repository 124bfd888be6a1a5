//! DDP and RDMAP headers: a parsed header is encoded to the same bytes, except for ignored bits.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rnic_abi::types::TerminateCode;
use rnic_core::ddp::Header;
use rnic_core::rdmap::{Control, Layout, ReadRequest, Terminate};
use rnic_core::stream::{Fault, terminate};

fuzz_target!(|data: &[u8]| {
    if let Ok((header, payload)) = Header::parse(data) {
        let mut bytes = [0xEE; 18];
        let len = header.emit(&mut bytes);
        assert_eq!(len, header.len());
        assert_eq!(len + payload.len(), data.len());
        assert_eq!(Header::parse(&bytes[..len]).map(|(h, _)| h), Ok(header));
        let _ = header.to_string();
    }
    if let Some(byte) = data.first() {
        assert_eq!(Control::parse(*byte).byte(), byte & !0x30);
    }
    if let Some(bytes) = data.first_chunk() {
        let request = ReadRequest::parse(bytes);
        assert_eq!(request.emit(), *bytes);
        let _ = request.advanced(u32::MAX);
    }
    if let Ok(t) = Terminate::parse(data) {
        let bytes = t.to_vec();
        assert!(bytes.len() <= Terminate::MAX_LEN && bytes.len() == t.buffer_len());
        let again = Terminate::parse(&bytes).expect("written by this code");
        if t.layout == Layout::Rfc5040 {
            assert_eq!(again, t);
        }
        let _ = t.to_string();
    }
    let code = TerminateCode { layer: 0, etype: 1, code: 0 };
    for fault in [Fault::TOO_SHORT, Fault::local(code), Fault::segment(code), Fault::read(code)] {
        let bytes = terminate::build(fault, data, None);
        assert!(bytes.len() <= Terminate::MAX_LEN);
        Terminate::parse(&bytes).expect("written by this code");
    }
});
