//! Control messages: decodes arbitrary bytes, and checks that encoding and decoding a message
//! returns the same message.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rnic_abi::abi::control::{
    Event, GidRow, Hello, HelloReply, MAX_MESSAGE, QpChange, Reply, ReplyBody, Request,
    RequestBody, Sending, Wiring,
};
use rnic_abi::abi::queue::ChannelRecord;
use rnic_abi::types::{Access, Gid, QpId};
use rnic_fuzz::Input;

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
    // The daemon refuses longer packets before it decodes them.
    if data.len() > MAX_MESSAGE {
        return;
    }
    if let Ok((request, _)) = postcard::take_from_bytes::<Request>(data) {
        let bytes = postcard::to_stdvec(&request).expect("encodable");
        assert_eq!(postcard::from_bytes::<Request>(&bytes), Ok(request));
    }
    if let Ok((reply, _)) = postcard::take_from_bytes::<Reply>(data) {
        let bytes = postcard::to_stdvec(&reply).expect("encodable");
        assert_eq!(postcard::from_bytes::<Reply>(&bytes), Ok(reply));
    }
    if let Ok((event, _)) = postcard::take_from_bytes::<Event>(data) {
        let bytes = postcard::to_stdvec(&event).expect("encodable");
        assert_eq!(postcard::from_bytes::<Event>(&bytes), Ok(event));
    }
    qp_changes(&mut Input(data));
});

/// Encodes and decodes requests and replies about RC, UC and UD QPs, generated from the input.
fn qp_changes(input: &mut Input<'_>) {
    let gid = |input: &mut Input<'_>| {
        let mut gid = [0; 16];
        let some = input.take(16);
        gid[..some.len()].copy_from_slice(some);
        Gid(gid)
    };
    let rights = |input: &mut Input<'_>| Access::from_bits_retain(input.u64() as u32);
    let change = match input.u8() % 9 {
        0 => QpChange::ReadyToReceive(Wiring {
            local: gid(input),
            remote: gid(input),
            remote_qp: QpId(input.u64() as u32),
            rq_psn: input.u64() as u32,
            path_mtu: input.u16(),
            min_rnr_timer: input.u8(),
            ird: input.u16(),
            rights: rights(input),
        }),
        1 => QpChange::ReadyToSend(Sending {
            sq_psn: input.u64() as u32,
            timeout: input.u8(),
            retry_count: input.u8(),
            rnr_retry: input.u8(),
            ord: input.u16(),
        }),
        2 => QpChange::DrainSendQueue,
        3 => QpChange::Reset,
        4 => QpChange::Rights(rights(input)),
        5 => QpChange::MinRnrTimer(input.u8()),
        6 => QpChange::ReceiveDatagrams { q_key: input.u64() as u32 },
        7 => QpChange::QKey(input.u64() as u32),
        _ => return gids(input, gid),
    };
    let body = RequestBody::ModifyQp { qp: QpId(input.u64() as u32), change };
    for body in [body, RequestBody::QueryGids] {
        let request = Request { id: input.u64() as u32, body };
        let bytes = postcard::to_stdvec(&request).expect("encodable");
        for cut in 0..bytes.len() {
            assert!(postcard::from_bytes::<Request>(&bytes[..cut]).is_err());
        }
        assert_eq!(postcard::from_bytes::<Request>(&bytes), Ok(request));
    }
}

fn gids(input: &mut Input<'_>, gid: impl Fn(&mut Input<'_>) -> Gid) {
    let rows = (0..input.u8() % 8).map(|_| GidRow {
        gid: gid(input),
        interface: input.u8().to_string(),
        interface_index: input.u64() as u32,
        mtu: input.u64() as u32,
    });
    let result = Ok(ReplyBody::Gids(rows.collect()));
    let reply = Reply { id: 1, diagnosis_id: 0, result };
    let bytes = postcard::to_stdvec(&reply).expect("encodable");
    assert_eq!(postcard::from_bytes::<Reply>(&bytes), Ok(reply));
}
