//! Serves several connections at a time, one thread each.

use std::convert::Infallible;
use std::fmt::Display;
use std::sync::atomic::{AtomicUsize, Ordering};

use rnic_client::{ConnectionRequest, Error, Listener};

/// Serves incoming connections, at most `most` at a time, and rejects further connections with
/// `full` as private data. Passes the error of each connection to `report`. Returns only when the
/// daemon has exited and all threads have ended.
pub fn serve<E: Display>(
    listener: &Listener,
    most: usize,
    full: &[u8],
    report: impl Fn(&str) + Sync,
    serve: impl Fn(ConnectionRequest) -> Result<(), E> + Sync,
) -> Result<Infallible, Error> {
    let active = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        loop {
            let request = listener.accept_request(None)?;
            let peer = request.peer();
            if active.load(Ordering::Relaxed) >= most {
                // Fails if the peer has already left.
                let _ = request.reject(full);
                report(&format!("rejected {peer}: {most} clients are already connected"));
                continue;
            }
            // Only this thread adds, so the limit holds.
            active.fetch_add(1, Ordering::Relaxed);
            let active = &active;
            let report = &report;
            let serve = &serve;
            scope.spawn(move || {
                let outcome = serve(request);
                active.fetch_sub(1, Ordering::Relaxed);
                if let Err(e) = outcome {
                    report(&e.to_string());
                }
            });
        }
    })
}
