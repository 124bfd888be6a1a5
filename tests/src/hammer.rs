//! Clients that never stop: one writes through whatever STag it is given until that fails, one
//! binds a window again and again.

use std::net::SocketAddr;

use rnic_client::{
    AcceptOptions, Access, Bind, Completion, ConnectOptions, Context, Cq, Pd, Qp, QpOptions,
    RecvRequest, RemoteMr, SendRequest, WindowKind,
};

use crate::DEADLINE;
use crate::traffic::Failure;

/// Writes under way at a time.
const DEPTH: u32 = 16;

/// Connects to `host` again and again, and writes bytes of `0x11` all over the memory that its
/// message names, until the host ends that connection. Returns how often, when nobody listens any
/// more.
pub fn hammer(context: &Context, host: SocketAddr) -> Result<u64, Failure> {
    let pd = context.open_pd(None)?;
    let cq = context.create_cq(256, None)?;
    let letters = context.create_shared_buffer(4096)?;
    let letter = pd.reg_mr(&letters, .., Access::LOCAL_WRITE)?;
    let room = [letter.sge(0, RemoteMr::LEN as u32)];
    for times in 0.. {
        let qp = pd.create_qp(&QpOptions { signal_all: true, ..QpOptions::new(&cq) })?;
        let options = ConnectOptions { timeout: Some(DEADLINE), ..ConnectOptions::default() };
        qp.post_recv(&[RecvRequest::new(0, &room)])?;
        if qp.connect(host, &options).is_err() {
            return Ok(times);
        }
        let mut received = [Completion::default()];
        if cq.wait(&mut received, Some(DEADLINE))? == 0 {
            return Err("no message in time".into());
        }
        received[0].ok()?;
        let mut named = [0; RemoteMr::LEN];
        letter.read_at(0, &mut named)?;
        let target = RemoteMr::from_bytes(&named).ok_or("no memory was named")?;
        let buffer = context.create_shared_buffer(target.len)?;
        let source = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE)?;
        source.fill(0, target.len as usize, 0x11)?;
        // A region fits into an element.
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

/// Two QPs of one domain that are connected to each other.
pub fn couple(context: &Context, pd: &Pd, cq: &Cq) -> Result<(Qp, Qp), Failure> {
    let listener = context.listen("127.0.0.1:0", 1)?;
    let (active, passive) =
        (pd.create_qp(&QpOptions::new(cq))?, pd.create_qp(&QpOptions::new(cq))?);
    active.start_connect(listener.local_addr(), &ConnectOptions::default())?;
    let request = listener.accept_request(Some(DEADLINE))?;
    request.accept(&passive, &AcceptOptions::default())?;
    active.wait_connected(Some(DEADLINE))?;
    Ok((active, passive))
}

/// Binds windows of both types to one region and unbinds them, as fast as it can, for ever.
pub fn bind_for_ever(context: &Context) -> Result<(), Failure> {
    let pd = context.open_pd(None)?;
    let cq = context.create_cq(256, None)?;
    let (qp, _peer) = couple(context, &pd, &cq)?;
    let buffer = context.create_shared_buffer(4096)?;
    let region = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE | Access::MW_BIND)?;
    let bind = Bind::new(&region, 8..16, Access::REMOTE_WRITE);
    loop {
        let (one, two) = (pd.alloc_window(WindowKind::Type1)?, pd.alloc_window(WindowKind::Type2)?);
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
        // Its bind is under way when it goes, and so is the region's when the process ends.
        one.bind(&qp, 5, &bind)?;
        let mut last = [Completion::default()];
        cq.wait(&mut last, Some(DEADLINE))?;
    }
}
