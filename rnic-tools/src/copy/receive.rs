//! The receiving side of a copy.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use rnic_client::{
    AcceptOptions, Access, ConnectionRequest, Context, Listener, Mr, MrOptions, Scope,
};
use sha2::{Digest as _, Sha256};

use super::incoming::Incoming;
use super::wire::{Grant, MAX_MESSAGE, Message, Offer, refusal};
use super::{CopyError, Digest, FileName, Progress, ReceiveOptions, Report};
use crate::link::LinkError;
use crate::messenger::{Messenger, MessengerEvent, MessengerSizes};

/// Waits for one sender and receives its file into `folder`; see [`receive_file`].
///
/// `timeout` limits only the wait for the sender; `None` waits forever.
pub fn serve_one(
    context: &Context,
    listener: &Listener,
    folder: &Path,
    options: &ReceiveOptions,
    timeout: Option<Duration>,
    progress: impl FnMut(&FileName, Progress),
) -> Result<Report, CopyError> {
    let request = listener.accept_request(timeout)?;
    receive_file(context, request, folder, options, progress)
}

/// Receives the file that a connection request offers into `folder`.
///
/// The file gets its name only if it is complete. `progress` is called with the name after each
/// step. Rejects the connection, with a reason for the sender, if it cannot accept the file.
pub fn receive_file(
    context: &Context,
    request: ConnectionRequest,
    folder: &Path,
    options: &ReceiveOptions,
    mut progress: impl FnMut(&FileName, Progress),
) -> Result<Report, CopyError> {
    let start = Instant::now();
    let peer = request.peer();
    let accepted = examine(request.private_data(), peer, folder, options).and_then(
        |(offer, name, incoming)| {
            let lent = Ring::lend(context, &offer, peer, options)?;
            Ok((offer, name, incoming, lent))
        },
    );
    let (offer, name, incoming, (ring, mut messenger)) = match accepted {
        Ok(accepted) => accepted,
        Err(e) => {
            let why = e.for_peer().unwrap_or_else(|| "the receiver lacks resources".to_owned());
            // Fails if the sender has left. The local error is more useful.
            let _ = request.reject(&refusal(&why));
            return Err(e);
        }
    };
    let accept = AcceptOptions {
        private_data: ring.grant.to_bytes(),
        timeout: Some(options.patience),
        ..AcceptOptions::default()
    };
    request
        .accept(messenger.qp(), &accept)
        .map_err(|source| LinkError::NotConnected { peer, source })?;

    let receiver = Receiver {
        messenger: &mut messenger,
        ring: &ring,
        peer,
        size: offer.size,
        incoming,
        hash: Sha256::new(),
        received: 0,
    };
    match receiver.copy(&mut |done| progress(&name, done)) {
        Ok(sha256) => {
            // The file has been stored, even if the sender does not get the message.
            if messenger.send(&Message::Stored { digest: sha256 }.to_bytes()).is_ok() {
                messenger.finish();
            }
            let seconds = start.elapsed().as_secs_f64();
            Ok(Report { name: name.to_string(), peer, bytes: offer.size, seconds, sha256 })
        }
        Err(e) => {
            if let Some(why) = e.for_peer()
                && messenger.send(&Message::Abort { why }.to_bytes()).is_ok()
            {
                messenger.finish();
            }
            Err(e)
        }
    }
}

/// Checks an offer, and creates the file without a name.
fn examine(
    private_data: &[u8],
    peer: SocketAddr,
    folder: &Path,
    options: &ReceiveOptions,
) -> Result<(Offer, FileName, Incoming), CopyError> {
    let offer = Offer::parse(private_data).map_err(|why| CopyError::Protocol { peer, why })?;
    let name = offer.name.clone()?;
    let refused = |why: String| CopyError::Refused { peer, name: name.to_string(), why };
    if let Some(max) = options.max_size.filter(|max| offer.size > *max) {
        return Err(refused(format!("{} bytes are above the limit of {max}", offer.size)));
    }
    let incoming = match Incoming::create(folder, name.clone(), options.replace) {
        Ok(incoming) => incoming,
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            return Err(refused(EXISTS.to_owned()));
        }
        Err(source) => {
            return Err(CopyError::Write { path: folder.join(name.as_str()), source });
        }
    };
    match incoming.room() {
        Ok(room) if room < offer.size => {
            Err(refused(format!("{} bytes do not fit the {room} that are free", offer.size)))
        }
        // If the free space is unknown, a full file system causes an error later.
        _ => Ok((offer, name, incoming)),
    }
}

/// Memory granted to the sender.
struct Ring {
    region: Mr,
    grant: Grant,
}

impl Ring {
    /// Creates a ring no larger than either side allows, and the only QP that may write into it.
    fn lend(
        context: &Context,
        offer: &Offer,
        peer: SocketAddr,
        options: &ReceiveOptions,
    ) -> Result<(Ring, Messenger), CopyError> {
        let chunk = offer.chunk.min(options.chunk).max(1);
        let chunks = offer.chunks.min(options.chunks).max(1);
        let bytes = u64::from(chunk) * u64::from(chunks);
        let pd = context.open_pd(None)?;
        let places = u32::from(chunks) + SPARE;
        let sizes = MessengerSizes {
            length: MAX_MESSAGE as u32,
            // A message for each chunk of the ring, and the end.
            receives: places,
            sends: places,
            others: 0,
        };
        let messenger = Messenger::new(context, &pd, sizes, peer, options.patience)?;
        let buffer = context.create_shared_buffer(bytes)?;
        let rights = MrOptions {
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::ZERO_BASED,
            scope: Scope::Qp(messenger.qp().id()),
            ..MrOptions::default()
        };
        let region = pd.reg_mr_with(&buffer, ..bytes, &rights)?;
        let grant = Grant { chunk, chunks, ring: region.remote() };
        Ok((Ring { region, grant }, messenger))
    }
}

/// A copy in progress.
struct Receiver<'a> {
    messenger: &'a mut Messenger,
    ring: &'a Ring,
    peer: SocketAddr,
    size: u64,
    incoming: Incoming,
    hash: Sha256,
    /// Chunks received so far.
    received: u64,
}

impl Receiver<'_> {
    /// Receives all chunks, compares the digest, and gives the file its name.
    fn copy(mut self, progress: &mut impl FnMut(Progress)) -> Result<Digest, CopyError> {
        let chunk = u64::from(self.ring.grant.chunk);
        let mut buffer = vec![0; chunk.min(self.size) as usize];
        let mut done = 0;
        loop {
            match self.message()? {
                Message::Filled { index, length }
                    if index == self.received
                        && length > 0
                        && u64::from(length) == chunk.min(self.size - done) =>
                {
                    // At most the size of the buffer, as checked above.
                    self.take(&mut buffer[..length as usize])?;
                    done += u64::from(length);
                    progress(Progress { done, total: self.size });
                }
                Message::Finished { size, digest } if size == self.size && done == size => {
                    return self.store(digest);
                }
                other => {
                    let why = format!("unexpected {other:?} after {done} of {} bytes", self.size);
                    return Err(CopyError::Protocol { peer: self.peer, why });
                }
            }
        }
    }

    /// Copies the next chunk out of the ring and returns its slot to the sender.
    fn take(&mut self, bytes: &mut [u8]) -> Result<(), CopyError> {
        let grant = self.ring.grant;
        let place = self.received % u64::from(grant.chunks);
        // The sender can write to the ring at any time, so only the copy is used from here on.
        self.ring.region.read_at(place * u64::from(grant.chunk), bytes)?;
        self.received += 1;
        let credit = Message::Credit { taken: self.received };
        self.messenger.send(&credit.to_bytes())?;
        self.hash.update(&*bytes);
        self.incoming.append(bytes).map_err(|source| self.cannot_write(source))
    }

    /// Gives the file its name if its digest matches.
    fn store(mut self, sent: Digest) -> Result<Digest, CopyError> {
        let arrived = Digest(self.hash.finalize_reset().into());
        if arrived != sent {
            return Err(CopyError::Digest { peer: self.peer, sent, arrived });
        }
        let path = self.incoming.path();
        let peer = self.peer;
        match self.incoming.commit() {
            Ok(()) => Ok(arrived),
            // Another process has created the file in between.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                Err(CopyError::Refused { peer, name, why: EXISTS.to_owned() })
            }
            Err(source) => Err(CopyError::Write { path, source }),
        }
    }

    /// Waits for the next message. An abort is an error.
    fn message(&mut self) -> Result<Message, CopyError> {
        let peer = self.peer;
        match self.messenger.next()? {
            MessengerEvent::Message(bytes) => match Message::parse(bytes) {
                Some(Message::Abort { why }) => Err(CopyError::Peer { peer, why }),
                Some(message) => Ok(message),
                None => Err(CopyError::Protocol { peer, why: "a malformed message".to_owned() }),
            },
            // Only messages are posted here.
            MessengerEvent::Done(request) => {
                let why = format!("completion of unknown request {request}");
                Err(CopyError::Protocol { peer, why })
            }
        }
    }

    fn cannot_write(&self, source: io::Error) -> CopyError {
        CopyError::Write { path: self.incoming.path(), source }
    }
}

const EXISTS: &str = "a file of this name already exists";
/// Messages in addition to one per chunk: the end, or an abort.
const SPARE: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn peer() -> SocketAddr {
        ([127, 0, 0, 1], 9).into()
    }

    fn offer(name: &str, size: u64) -> Vec<u8> {
        Offer { size, chunk: 4096, chunks: 4, name: FileName::new(name) }.to_bytes()
    }

    fn refusal_of(private_data: &[u8], folder: &Path, options: &ReceiveOptions) -> String {
        let outcome = examine(private_data, peer(), folder, options);
        let e = outcome.err().expect("the offer is refused");
        e.for_peer().expect("the sender gets the reason")
    }

    #[test]
    fn files_that_cannot_be_stored_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let options = ReceiveOptions { max_size: Some(100), ..ReceiveOptions::default() };
        assert!(examine(&offer("a", 100), peer(), folder.path(), &options).is_ok());
        let said = refusal_of(&offer("a", 101), folder.path(), &options);
        assert!(said.contains("above the limit of 100"), "{said}");
        let options = ReceiveOptions::default();
        let said = refusal_of(&offer("a", u64::MAX), folder.path(), &options);
        assert!(said.contains("do not fit"), "{said}");
        std::fs::write(folder.path().join("a"), b"old").unwrap();
        let said = refusal_of(&offer("a", 1), folder.path(), &options);
        assert!(said.contains("already"), "{said}");
        let replace = ReceiveOptions { replace: true, ..options.clone() };
        assert!(examine(&offer("a", 1), peer(), folder.path(), &replace).is_ok());
        let said = refusal_of(&[offer("", 1), b"../b".to_vec()].concat(), folder.path(), &options);
        assert!(said.contains("has a slash"), "{said}");
        let said = refusal_of(b"GET /", folder.path(), &options);
        assert!(said.contains("does not run rnic-copy"), "{said}");
        let said = refusal_of(&offer("b", 1), &folder.path().join("gone"), &options);
        assert!(said.contains("cannot write it") && !said.contains("gone"), "{said}");
    }
}
