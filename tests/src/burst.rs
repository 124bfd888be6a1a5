//! Many small Writes and the number of system calls that posting them takes.

use std::net::SocketAddr;

use rnic_client::{
    AcceptOptions, Access, Completion, ConnectOptions, Context, Listener, Mr, Qp, QpOptions,
    RemoteMr, SendRequest,
};

use crate::DEADLINE;
use crate::traffic::Failure;

/// Writes per batch. The last Write of a batch is signaled.
const BATCH: u64 = 32;

/// Accepts a guest and sends it the address of a region.
pub fn accept(context: &Context, listener: &Listener) -> Result<(Qp, Mr), Failure> {
    let pd = context.open_pd(None)?;
    let buffer = context.create_shared_buffer(4096)?;
    let region = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    let cq = context.create_cq(16, None)?;
    let qp = pd.create_qp(&QpOptions::new(&cq))?;
    let private_data = region.remote().to_bytes().to_vec();
    let options = AcceptOptions { private_data, ..AcceptOptions::default() };
    listener.accept_request(Some(DEADLINE))?.accept(&qp, &options)?;
    Ok((qp, region))
}

/// Posts `posts` Writes of 8 bytes. Returns the number of read and write system calls it took.
pub fn post(context: &Context, address: SocketAddr, posts: u64) -> Result<u64, Failure> {
    let pd = context.open_pd(None)?;
    let cq = context.create_cq(1024, None)?;
    let qp = pd.create_qp(&QpOptions { sq_depth: 512, ..QpOptions::new(&cq) })?;
    let connected = qp.connect(address, &ConnectOptions::default())?;
    let region = RemoteMr::from_bytes(&connected.private_data)
        .ok_or("the private data contains no region")?;
    let write = |n: u64| SendRequest::write_inline(n, b"8 bytes!", region.at(0));
    let mut batch: Vec<SendRequest<'_>> = (0..BATCH).map(write).collect();
    if let Some(last) = batch.last_mut() {
        *last = last.signaled();
    }
    let before = calls()?;
    let mut posted = 0;
    let mut done = 0;
    while done < posts {
        if posted < posts && posted - done <= 512 - BATCH {
            qp.post_send(&batch)?;
            posted += BATCH;
        }
        let mut some = [Completion::default(); 16];
        let n = cq.poll(&mut some)?;
        for completion in &some[..n] {
            completion.ok()?;
            done += BATCH;
        }
        if n == 0 && posted - done > 512 - BATCH {
            std::thread::yield_now();
        }
    }
    let after = calls()?;
    qp.abort()?;
    Ok(after - before)
}

/// Returns the number of read and write system calls of this process so far.
fn calls() -> Result<u64, Failure> {
    let io = std::fs::read_to_string("/proc/self/io")?;
    let counts = io.lines().filter(|l| l.starts_with("syscr:") || l.starts_with("syscw:"));
    let mut sum = 0;
    for line in counts {
        sum += line[6..].trim().parse::<u64>()?;
    }
    Ok(sum)
}
