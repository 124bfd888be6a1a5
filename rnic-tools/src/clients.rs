//! Serving several connections at a time, one thread each.

use std::convert::Infallible;
use std::fmt::Display;
use std::sync::atomic::{AtomicUsize, Ordering};

use rnic_client::{ConnectionRequest, Error, Listener};

/// Serves every connection that comes, `most` at a time; more are rejected with `full` as private
/// data. What goes wrong with one is told to `report` and harms no other. Returns only when the
/// daemon is gone and all threads have ended.
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
                // The peer may have gone already.
                let _ = request.reject(full);
                report(&format!("turned {peer} away: {most} are served already"));
                continue;
            }
            // Only this thread adds, so that the bound holds.
            active.fetch_add(1, Ordering::Relaxed);
            let (active, report, serve) = (&active, &report, &serve);
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
