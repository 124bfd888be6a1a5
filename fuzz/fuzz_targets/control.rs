//! Control messages: decoding anything, and whether what was decoded is what was meant.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rnic_core::abi::control::{Event, Hello, HelloReply, MAX_MESSAGE, Reply, Request};
use rnic_core::abi::queue::ChannelRecord;

fuzz_target!(|data: &[u8]| {
    if let Some(hello) = Hello::from_bytes(data) {
        assert_eq!(Hello::from_bytes(&hello.to_bytes()), Some(hello));
    }
    if let Some(reply) = HelloReply::from_bytes(data) {
        assert_eq!(HelloReply::from_bytes(&reply.to_bytes()), Some(reply));
    }
    if let Some(record) = ChannelRecord::from_bytes(data) {
        assert_eq!(record.to_bytes(), data);
    }
    // Longer packets are refused before they are decoded.
    if data.len() > MAX_MESSAGE {
        return;
    }
    if let Ok((request, _)) = postcard::take_from_bytes::<Request>(data) {
        let bytes = postcard::to_stdvec(&request).expect("it can be written");
        assert_eq!(postcard::from_bytes::<Request>(&bytes), Ok(request));
    }
    if let Ok((reply, _)) = postcard::take_from_bytes::<Reply>(data) {
        let bytes = postcard::to_stdvec(&reply).expect("it can be written");
        assert_eq!(postcard::from_bytes::<Reply>(&bytes), Ok(reply));
    }
    if let Ok((event, _)) = postcard::take_from_bytes::<Event>(data) {
        let bytes = postcard::to_stdvec(&event).expect("it can be written");
        assert_eq!(postcard::from_bytes::<Event>(&bytes), Ok(event));
    }
});
