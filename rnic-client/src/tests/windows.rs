//! Memory windows: posted requests, keys, and regions kept alive.

use rnic_abi::abi::control::RequestBody;
use rnic_abi::abi::queue::{SendFlags, SendHeader, SendOpcode, WindowParams};

use super::{Rig, rig};
use crate::fake::Answer;
use crate::*;

/// Takes and retires the next request of the send queue.
fn posted(r: &Rig) -> SendHeader {
    let mut device = r.daemon.device();
    let qp = device.qps.get_mut(&r.qp.id()).unwrap();
    let header = qp.next_request().0.header;
    qp.sq.retire(1);
    header
}

fn region(r: &Rig) -> Mr {
    let buffer = r.context.create_shared_buffer(4096).unwrap();
    r.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE | Access::MW_BIND).unwrap()
}

/// Returns the regions and windows removed by the client, in order, as "MR 1" and "MW 2".
fn removed(r: &Rig) -> Vec<String> {
    let mut device = r.daemon.device();
    let requests = device.requests.drain(..).filter_map(|body| match body {
        RequestBody::DeregMr { mr } => Some(format!("MR {mr}")),
        RequestBody::DeallocWindow { window } => Some(format!("MW {window}")),
        _ => None,
    });
    requests.collect()
}

fn in_use() -> Answer {
    Answer::Refuse(Refusal::InUse {
        kind: "MR".to_owned(),
        handle: 0,
        by: "2 bound windows".to_owned(),
    })
}

#[test]
fn binds_arrive_intact() {
    let r = rig();
    let region = region(&r);
    let one = r.pd.alloc_window(WindowKind::Type1).unwrap();
    let two = r.pd.alloc_window(WindowKind::Type2).unwrap();
    // The fake's first key is 0xFE.
    let first = one.rkey();
    let bind = Bind::new(&region, 16..80, Access::REMOTE_READ);
    for key in [0xFF, 0x00] {
        let present = one.rkey();
        let remote = one.bind(&r.qp, 5, &bind).unwrap();
        assert_eq!(remote.rkey, Stag(first.0 & !0xFF | key));
        assert_eq!((remote.addr, remote.len), (region.iova() + 16, 64));
        let header = posted(&r);
        assert_eq!((header.opcode, header.wr_id), (SendOpcode::BindWindow as u8, 5));
        assert_eq!((header.rkey, header.inv_rkey), (present.0, remote.rkey.0));
        assert_eq!((header.flags, header.num_sge), (SendFlags::SIGNALED.bits(), 0));
        let address = region.iova() + 16;
        let params = WindowParams { address, length: 64, lkey: region.lkey().0, access: 4 };
        assert_eq!(WindowParams::from_params(header.params), params);
    }
    one.unbind(&r.qp, 6).unwrap();
    let header = posted(&r);
    assert_eq!((header.rkey & 0xFF, header.inv_rkey & 0xFF, header.params), (0, 1, [0; 4]));
    assert_eq!((one.rkey(), one.remote()), (Stag(first.0 & !0xFF | 1), None));

    let remote = two.bind_with_key(&r.qp, 7, &bind, 0x33).unwrap();
    assert_eq!((posted(&r).inv_rkey, remote.rkey.0 & 0xFF), (remote.rkey.0, 0x33));
    two.unbind(&r.qp, 8).unwrap();
    let header = posted(&r);
    assert_eq!(header.opcode, SendOpcode::LocalInvalidate as u8);
    assert_eq!((header.inv_rkey, two.rkey()), (remote.rkey.0, remote.rkey));
}

#[test]
fn a_bind_that_is_not_posted_changes_nothing() {
    let r = rig();
    let region = region(&r);
    let window = r.pd.alloc_window(WindowKind::Type1).unwrap();
    r.qp.post_send(&[SendRequest::send(1, &[]); 4]).unwrap();
    let before = window.rkey();
    let bind = Bind::new(&region, .., Access::REMOTE_READ);
    assert!(matches!(window.bind(&r.qp, 2, &bind), Err(Error::QueueFull { depth: 4 })));
    assert_eq!((window.rkey(), window.remote()), (before, None));
    drop(region);
    assert_eq!(removed(&r).len(), 1, "the window does not pin the region");
}

#[test]
fn region_ends_after_its_last_window() {
    let r = rig();
    let region = region(&r);
    let mr = format!("MR {}", region.id());
    let windows = [0, 1].map(|_| r.pd.alloc_window(WindowKind::Type1).unwrap());
    for window in &windows {
        window.bind(&r.qp, 1, &Bind::new(&region, .., Access::REMOTE_READ)).unwrap();
    }
    drop(region);
    assert_eq!(removed(&r), [""; 0]);
    let names = windows.each_ref().map(|w| format!("MW {}", w.id()));
    let [one, two] = windows;
    drop(one);
    assert_eq!(removed(&r), [names[0].clone()]);
    drop(two);
    assert_eq!(removed(&r), [names[1].clone(), mr]);
}

#[test]
fn rebound_window_releases_old_regions() {
    let r = rig();
    let first = region(&r);
    let second = region(&r);
    let mr = format!("MR {}", first.id());
    let window = r.pd.alloc_window(WindowKind::Type1).unwrap();
    window.bind(&r.qp, 1, &Bind::new(&first, .., Access::REMOTE_READ)).unwrap();
    drop(first);
    // The window may still be bound to the first region while the request is outstanding.
    r.daemon.device().script.push_back(in_use());
    window.bind(&r.qp, 2, &Bind::new(&second, .., Access::REMOTE_READ)).unwrap();
    assert_eq!(removed(&r), std::slice::from_ref(&mr));
    window.bind(&r.qp, 3, &Bind::new(&second, .., Access::REMOTE_READ)).unwrap();
    assert_eq!(removed(&r), [mr]);
    window.unbind(&r.qp, 4).unwrap();
    assert_eq!(removed(&r), [""; 0]);
}

#[test]
fn refused_deregistration_is_repeated() {
    let r = rig();
    let region = region(&r);
    let mr = format!("MR {}", region.id());
    let window = r.pd.alloc_window(WindowKind::Type1).unwrap();
    window.bind(&r.qp, 1, &Bind::new(&region, .., Access::REMOTE_READ)).unwrap();
    r.daemon.device().script.push_back(in_use());
    assert!(matches!(
        region.deregister(),
        Err(Error::Refused { refusal: Refusal::InUse { .. }, .. })
    ));
    let name = format!("MW {}", window.id());
    drop(window);
    assert_eq!(removed(&r), [mr.clone(), name, mr]);
}
