//! Clients that stress the daemon: one writes through each STag it receives until a Write fails,
//! and one binds and unbinds windows.

use std::net::SocketAddr;

use rnic_client::{
    AcceptOptions, Access, Bind, Completion, ConnectOptions, Context, Cq, Pd, Qp, QpOptions,
    RecvRequest, RemoteMr, SendRequest, WindowKind,
};

use crate::DEADLINE;
use crate::traffic::Failure;

/// Outstanding Writes.
const DEPTH: u32 = 16;

/// Connects to `host` repeatedly, and each time fills the region in the host's message with `0x11`
/// until a Write fails. When `host` no longer listens, returns the number of connections.
pub fn hammer(context: &Context, host: SocketAddr) -> Result<u64, Failure> {
    let pd = context.open_pd(None)?;
    let cq = context.create_cq(256, None)?;
    let messages = context.create_shared_buffer(4096)?;
    let inbox = pd.reg_mr(&messages, .., Access::LOCAL_WRITE)?;
    let inbox_sges = [inbox.sge(0, RemoteMr::LEN as u32)];
    for times in 0.. {
        let qp = pd.create_qp(&QpOptions { signal_all: true, ..QpOptions::new(&cq) })?;
        let options = ConnectOptions { timeout: Some(DEADLINE), ..ConnectOptions::default() };
        qp.post_recv(&[RecvRequest::new(0, &inbox_sges)])?;
        if qp.connect(host, &options).is_err() {
            return Ok(times);
        }
        let mut received = [Completion::default()];
        if cq.wait(&mut received, Some(DEADLINE))? == 0 {
            return Err("no message in time".into());
        }
        received[0].ok()?;
        let mut message = [0; RemoteMr::LEN];
        inbox.read_at(0, &mut message)?;
        let target = RemoteMr::from_bytes(&message).ok_or("the message contains no region")?;
        let buffer = context.create_shared_buffer(target.len)?;
        let source = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE)?;
        source.fill(0, target.len as usize, 0x11)?;
        // The region fits into one SGE.
        let sges = [source.sge(0, target.len as u32)];
        let write = SendRequest::write(1, &sges, target.at(0));
        qp.post_send(&[write; DEPTH as usize])?;
        let mut under_way = DEPTH;
        let mut failed = false;
        while under_way > 0 {
            let mut some = [Completion::default(); DEPTH as usize];
            let taken = cq.wait(&mut some, Some(DEADLINE))?;
            if taken == 0 {
                return Err("no completion in time".into());
            }
            under_way -= taken as u32;
            failed |= some[..taken].iter().any(|c| c.ok().is_err());
            if !failed {
                qp.post_send(&vec![write; taken])?;
                under_way += taken as u32;
            }
        }
        println!("refused: {:?}", qp.wait_disconnected(Some(DEADLINE))?);
    }
    Ok(0)
}

/// Connects two QPs of one domain.
pub fn couple(context: &Context, pd: &Pd, cq: &Cq) -> Result<(Qp, Qp), Failure> {
    let listener = context.listen("127.0.0.1:0", 1)?;
    let active = pd.create_qp(&QpOptions::new(cq))?;
    let passive = pd.create_qp(&QpOptions::new(cq))?;
    active.start_connect(listener.local_addr(), &ConnectOptions::default())?;
    let request = listener.accept_request(Some(DEADLINE))?;
    request.accept(&passive, &AcceptOptions::default())?;
    active.wait_connected(Some(DEADLINE))?;
    Ok((active, passive))
}

/// Binds windows of both types to a region and unbinds them, as fast as it can, forever.
pub fn bind_forever(context: &Context) -> Result<(), Failure> {
    let pd = context.open_pd(None)?;
    let cq = context.create_cq(256, None)?;
    let (qp, _peer) = couple(context, &pd, &cq)?;
    let buffer = context.create_shared_buffer(4096)?;
    let region = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE | Access::MW_BIND)?;
    let bind = Bind::new(&region, 8..16, Access::REMOTE_WRITE);
    loop {
        let one = pd.alloc_window(WindowKind::Type1)?;
        let two = pd.alloc_window(WindowKind::Type2)?;
        for key in 0..4 {
            one.bind(&qp, 1, &bind)?;
            two.bind_with_key(&qp, 2, &bind, key)?;
            one.unbind(&qp, 3)?;
            two.unbind(&qp, 4)?;
            let mut left = 4;
            while left > 0 {
                let mut some = [Completion::default(); 4];
                let taken = cq.wait(&mut some, Some(DEADLINE))?;
                some[..taken].iter().try_for_each(|c| c.ok().map(drop))?;
                left -= taken;
                if taken == 0 {
                    return Err("no completion in time".into());
                }
            }
        }
        println!("under way");
        // Drops both windows while one is bound. When the process ends, the region may be
        // deregistered while a window is bound to it.
        one.bind(&qp, 5, &bind)?;
        let mut last = [Completion::default()];
        cq.wait(&mut last, Some(DEADLINE))?;
    }
}
