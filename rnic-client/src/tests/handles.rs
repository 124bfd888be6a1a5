//! Properties of all handles: `Send` and `Sync`, `Debug`, and their descriptors.

use std::os::fd::{AsFd, AsRawFd};

use super::*;

#[test]
fn handles_are_send_and_sync() {
    fn both<T: Send + Sync>() {}
    both::<(Context, Pd, SharedBuffer, Mr, MemoryWindow, ProgramMr, RawBytes<'_>)>();
    both::<(Cq, CompletionChannel, Qp, Srq, Completion)>();
    both::<(Listener, ConnectionRequest, SocketListener, SocketRequest, Connected)>();
    both::<(OpenOptions, CqOptions<'_>, QpOptions<'_>, SrqOptions, MrOptions, Bind<'_>)>();
    both::<(ConnectOptions, AcceptOptions, SendRequest<'_>, RecvRequest<'_>, RemoteMr, RemoteAddr)>(
    );
    both::<(Error, PostError, SocketError, Refusal, Event, Rows, DeviceAttributes, StatusInfo)>();
    both::<(PdRow, LimitRow)>();
    #[cfg(feature = "tokio")]
    both::<Stream>();
    both::<(LocalMr, Lease, LeasedRequest, Posted, NotPosted)>();
}

#[cfg(feature = "tokio")]
#[test]
fn futures_are_send() {
    fn send<T: Send>(_: T) {}
    let r = rig();
    let listener = r.context.listen("127.0.0.1:0", 1).unwrap();
    send(r.cq.completions());
    send(r.qp.connect_async("127.0.0.1:1", &ConnectOptions::default()));
    send(r.qp.wait_connected_async());
    send(r.qp.wait_disconnected_async());
    send(r.context.next_event_async());
    let region = r.pd.reg_local(4096).unwrap();
    send(r.qp.send(region.lease(0..1).unwrap()));
    send(r.qp.recv(region.lease(1..2).unwrap()));
    send(Stream::connect(&r.context, "127.0.0.1:1"));
    send(listener.accept_request_async());
}

#[test]
fn handles_implement_debug() {
    let r = rig();
    let buffer = r.context.create_shared_buffer(4096).unwrap();
    let region = r.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
    let srq = r.pd.create_srq(&SrqOptions::default()).unwrap();
    let window = r.pd.alloc_window(WindowKind::Type2).unwrap();
    let listener = r.context.bind("127.0.0.1:0").unwrap();
    let channel = r.cq.channel();
    for (text, name, id) in [
        (format!("{:?}", r.context), "Context", format!("{:?}", r.context.session())),
        (format!("{:?}", r.pd), "Pd", format!("{:?}", r.pd.id())),
        (format!("{:?}", r.cq), "Cq", format!("{:?}", r.cq.id())),
        (format!("{:?}", r.qp), "Qp", format!("{:?}", r.qp.id())),
        (format!("{buffer:?}"), "SharedBuffer", format!("{:?}", buffer.id())),
        (format!("{region:?}"), "Mr", format!("{:?}", region.id())),
        (format!("{srq:?}"), "Srq", format!("{:?}", srq.id())),
        (format!("{window:?}"), "MemoryWindow", format!("{:?}", window.id())),
        (format!("{listener:?}"), "Listener", format!("{:?}", listener.id())),
        (format!("{channel:?}"), "CompletionChannel", format!("{:?}", channel.id())),
    ] {
        assert!(text.starts_with(&format!("{name} {{")) && text.contains(&id), "{text}");
    }
    let options = format!("{:?}", QpOptions::new(&r.cq));
    assert!(options.contains("sq_depth: 64"), "{options}");
}

#[test]
fn descriptors_match_their_channels() {
    let r = rig();
    let channel = r.cq.channel();
    assert_eq!(r.cq.as_raw_fd(), channel.as_raw_fd());
    assert_eq!(r.cq.as_fd().as_raw_fd(), channel.as_fd().as_raw_fd());
    assert_eq!(r.context.as_raw_fd(), r.context.as_fd().as_raw_fd());
    assert_ne!(r.context.as_raw_fd(), r.cq.as_raw_fd());
    let shared = r.context.create_cq(4, Some(&channel)).unwrap();
    assert_eq!(shared.channel().id(), channel.id());
    // The event arrives on this descriptor.
    r.cq.arm(Arm::Next).unwrap();
    assert_eq!(channel.recv(Some(Duration::ZERO)).unwrap(), None);
    r.daemon.device().fire(r.cq.id());
    let mut fds = [rustix::event::PollFd::new(&r.cq, rustix::event::PollFlags::IN)];
    let soon = rustix::event::Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut fds, Some(&soon)), Ok(1));
    assert_eq!(channel.recv(Some(Duration::ZERO)).unwrap(), Some(r.cq.id()));
}

#[test]
fn regions_copy_and_give_raw_access() {
    let r = rig();
    let [one, other] = [(); 2].map(|()| r.context.create_shared_buffer(8192).unwrap());
    let from = r.pd.reg_mr(&one, 100..200, Access::LOCAL_WRITE).unwrap();
    let to = r.pd.reg_mr(&other, 4000.., Access::LOCAL_WRITE).unwrap();
    from.write_at(10, b"from here to there").unwrap();
    from.copy_to(10, &to, 50, 18).unwrap();
    let mut seen = [0; 18];
    to.read_at(50, &mut seen).unwrap();
    assert_eq!(&seen, b"from here to there");
    // Overlapping ranges of one region.
    to.copy_to(50, &to, 55, 13).unwrap();
    to.read_at(50, &mut seen).unwrap();
    assert_eq!(&seen, b"from from here to ");
    for (offset, to_offset, length) in [(99, 0, 2), (0, 4191, 2), (u64::MAX, 0, 1)] {
        let refused = from.copy_to(offset, &to, to_offset, length);
        assert!(matches!(refused, Err(Error::OutOfRange { .. })), "{refused:?}");
    }
    let raw = to.raw(50, 18).unwrap();
    assert_eq!((raw.as_ptr() as u64, raw.len()), (to.iova() + 50, 18));
    assert!(matches!(to.raw(4191, 2), Err(Error::OutOfRange { size: 4192, .. })));
}
