//! The sending side of a copy.

use std::fs::File;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Instant;

use rnic_client::{Access, ConnectOptions, Context, Mr, SendRequest};
use sha2::{Digest as _, Sha256};

use super::wire::{self, Grant, MAX_MESSAGE, Message, Offer};
use super::{CopyError, Digest, FileName, NameError, Progress, Report, SendOptions};
use crate::link::{self, LinkError};
use crate::messenger::{Messenger, MessengerEvent, MessengerSizes};

/// Copies the file at `path` to the receiver at `peer`. Returns when the receiver has stored it.
///
/// `progress` is called after each step. The connection has ended when this returns.
pub fn send_file(
    context: &Context,
    path: &Path,
    peer: SocketAddr,
    options: &SendOptions,
    mut progress: impl FnMut(Progress),
) -> Result<Report, CopyError> {
    let start = Instant::now();
    let mut source = SourceFile::open(path)?;
    let name = match &options.name {
        Some(name) => FileName::new(name)?,
        None => own_name(path)?,
    };
    let offer = Offer {
        size: source.size,
        chunk: options.chunk.clamp(1, super::MAX_CHUNK),
        chunks: options.chunks.clamp(1, super::MAX_CHUNKS),
        name: Ok(name.clone()),
    };

    let pd = context.open_pd(None)?;
    let places = u32::from(offer.chunks) + SPARE;
    let sizes = MessengerSizes {
        length: MAX_MESSAGE as u32,
        // A credit for each chunk in flight, and the result.
        receives: places,
        // A message for each chunk in flight, and the end.
        sends: places,
        // The Write before each message.
        others: places,
    };
    let messenger = Messenger::new(context, &pd, sizes, peer, options.patience)?;
    let connect = ConnectOptions { private_data: offer.to_bytes(), ..ConnectOptions::default() };
    let reply = link::connect(messenger.qp(), peer, &connect).map_err(refused)?;
    let grant = Grant::parse(&reply.private_data, &offer)
        .map_err(|why| CopyError::Protocol { peer, why })?;
    // The sender's copy of the ring, with the same slots.
    let buffer = context.create_shared_buffer(grant.ring.len)?;
    let ring = pd.reg_mr(&buffer, ..grant.ring.len, Access::empty())?;
    let mut sender = Sender { messenger, ring, grant, peer, sent: 0, taken: 0 };
    match sender.copy(&mut source, &mut progress) {
        Ok(sha256) => {
            sender.messenger.finish();
            let seconds = start.elapsed().as_secs_f64();
            Ok(Report { name: name.to_string(), peer, bytes: source.size, seconds, sha256 })
        }
        Err(e) => {
            if let Some(why) = e.for_peer()
                && sender.messenger.send(&Message::Abort { why }.to_bytes()).is_ok()
            {
                sender.messenger.finish();
            }
            Err(e)
        }
    }
}

/// The file to send.
struct SourceFile<'a> {
    path: &'a Path,
    file: File,
    size: u64,
    hash: Sha256,
}

struct Sender {
    messenger: Messenger,
    /// Chunks to be sent, at the same offsets as in the receiver's ring.
    ring: Mr,
    grant: Grant,
    peer: SocketAddr,
    /// Number of chunks sent.
    sent: u64,
    /// Number of chunks taken by the receiver; never more than `sent`.
    taken: u64,
}

impl Sender {
    fn copy(
        &mut self,
        source: &mut SourceFile<'_>,
        progress: &mut impl FnMut(Progress),
    ) -> Result<Digest, CopyError> {
        let chunk = u64::from(self.grant.chunk);
        let total = source.size.div_ceil(chunk);
        let mut buffer = vec![0; chunk.min(source.size) as usize];
        while self.sent < total {
            while self.sent - self.taken == u64::from(self.grant.chunks) {
                self.await_credit()?;
            }
            // At most the size of a chunk.
            let length = chunk.min(source.size - self.sent * chunk) as u32;
            let bytes = &mut buffer[..length as usize];
            source.read(bytes)?;
            self.send_chunk(bytes, length)?;
            progress(self.progress(source.size));
        }
        source.ended()?;
        let digest = Digest(source.hash.finalize_reset().into());
        let finished = Message::Finished { size: source.size, digest };
        self.messenger.send(&finished.to_bytes())?;
        loop {
            match self.message()? {
                Message::Credit { taken } => self.credit(taken)?,
                Message::Stored { digest: stored } if stored == digest => {
                    progress(Progress { done: source.size, total: source.size });
                    return Ok(digest);
                }
                Message::Stored { digest: stored } => {
                    return Err(CopyError::StoredOther { peer: self.peer, sent: digest, stored });
                }
                other => return Err(self.unexpected(&other)),
            }
            progress(self.progress(source.size));
        }
    }

    /// Writes a chunk into its slot and announces it. The slot is free on both sides, because the
    /// receiver returns it only after its previous content has arrived.
    fn send_chunk(&mut self, bytes: &[u8], length: u32) -> Result<(), CopyError> {
        let place = self.sent % u64::from(self.grant.chunks);
        let at = place * u64::from(self.grant.chunk);
        self.ring.write_at(at, bytes)?;
        let sge = [self.ring.sge(at, length)];
        let write = SendRequest::write(self.sent, &sge, self.grant.ring.at(at));
        let filled = Message::Filled { index: self.sent, length };
        self.messenger.send_after(Some(write), &filled.to_bytes())?;
        self.sent += 1;
        Ok(())
    }

    fn await_credit(&mut self) -> Result<(), CopyError> {
        match self.message()? {
            Message::Credit { taken } => self.credit(taken),
            other => Err(self.unexpected(&other)),
        }
    }

    fn credit(&mut self, taken: u64) -> Result<(), CopyError> {
        if taken <= self.taken || taken > self.sent {
            let why = format!(
                "credit for {taken} chunks, but {} were sent and {} credited before",
                self.sent, self.taken
            );
            return Err(CopyError::Protocol { peer: self.peer, why });
        }
        self.taken = taken;
        Ok(())
    }

    /// Waits for the next message. An abort is an error.
    fn message(&mut self) -> Result<Message, CopyError> {
        let peer = self.peer;
        loop {
            if let MessengerEvent::Message(bytes) = self.messenger.next()? {
                return match Message::parse(bytes) {
                    Some(Message::Abort { why }) => Err(CopyError::Peer { peer, why }),
                    Some(message) => Ok(message),
                    None => {
                        let why = "a malformed message".to_owned();
                        Err(CopyError::Protocol { peer, why })
                    }
                };
            }
        }
    }

    fn unexpected(&self, message: &Message) -> CopyError {
        CopyError::Protocol { peer: self.peer, why: format!("{message:?} was not expected") }
    }

    fn progress(&self, total: u64) -> Progress {
        // Cannot overflow: `taken` chunks are less than the size of the file plus one chunk.
        Progress { done: (self.taken * u64::from(self.grant.chunk)).min(total), total }
    }
}

impl<'a> SourceFile<'a> {
    fn open(path: &'a Path) -> Result<Self, CopyError> {
        let failed = |source| CopyError::Read { path: path.to_path_buf(), source };
        // Opening a pipe without a writer would block.
        let metadata = std::fs::metadata(path).map_err(failed)?;
        if !metadata.is_file() {
            return Err(CopyError::NotRegular { path: path.to_path_buf() });
        }
        let file = File::open(path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        Ok(SourceFile { path, file, size, hash: Sha256::new() })
    }

    /// Reads and hashes the next bytes.
    fn read(&mut self, bytes: &mut [u8]) -> Result<(), CopyError> {
        self.file.read_exact(bytes).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => self.changed("became shorter"),
            _ => CopyError::Read { path: self.path.to_path_buf(), source: e },
        })?;
        self.hash.update(bytes);
        Ok(())
    }

    /// Checks that the file has not grown.
    fn ended(&mut self) -> Result<(), CopyError> {
        match self.file.read(&mut [0]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(self.changed("became longer")),
            Err(source) => Err(CopyError::Read { path: self.path.to_path_buf(), source }),
        }
    }

    fn changed(&self, how: &'static str) -> CopyError {
        CopyError::Changed { path: self.path.to_path_buf(), how }
    }
}

/// Returns the file name of a path.
fn own_name(path: &Path) -> Result<FileName, NameError> {
    match path.file_name() {
        Some(name) => FileName::from_bytes(name.as_encoded_bytes()),
        None => FileName::new(""),
    }
}

/// Converts a rejection to the receiver's reason.
fn refused(e: LinkError) -> CopyError {
    if let LinkError::Rejected { peer, private_data } = &e
        && let Some(why) = wire::parse_refusal(private_data)
    {
        return CopyError::Peer { peer: *peer, why };
    }
    e.into()
}

/// Messages in addition to one per chunk: the end, or an abort.
const SPARE: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn only_regular_files_are_sent() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        assert!(matches!(SourceFile::open(&missing), Err(CopyError::Read { .. })));
        assert!(matches!(SourceFile::open(folder.path()), Err(CopyError::NotRegular { .. })));
        let device = Path::new("/dev/null");
        assert!(matches!(SourceFile::open(device), Err(CopyError::NotRegular { .. })));
    }

    #[test]
    fn a_file_that_changes_fails_the_copy() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"12345678").unwrap();
        let path = file.path().to_path_buf();
        let mut source = SourceFile::open(&path).unwrap();
        source.read(&mut [0; 8]).unwrap();
        source.ended().unwrap();
        file.write_all(b"9").unwrap();
        let e = source.ended().unwrap_err().to_string();
        assert!(e.ends_with("became longer while it was copied"), "{e}");
        let mut source = SourceFile::open(&path).unwrap();
        file.as_file().set_len(4).unwrap();
        let e = source.read(&mut [0; 8]).unwrap_err().to_string();
        assert!(e.ends_with("became shorter while it was copied"), "{e}");
    }

    #[test]
    fn a_path_without_a_name_is_refused() {
        assert_eq!(own_name(Path::new("/tmp/a.bin")).unwrap().as_str(), "a.bin");
        assert!(own_name(Path::new("/")).is_err());
        assert!(own_name(Path::new("..")).is_err());
    }
}
