//! Misuse of rarer objects: windows, attached memory, passed sockets.

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use rnic_abi::abi::control::*;
use rnic_abi::types::*;

use super::{Session, open, pick};
use crate::traffic::Rng;

/// Memory to attach. A static outlives every session that has registered it.
static ATTACHED: [AtomicU64; 8192] = [const { AtomicU64::new(0) }; 8192];

/// Rarer objects of a session.
#[derive(Default)]
pub(super) struct Objects {
    windows: Vec<(MwId, Stag)>,
    attached: bool,
    /// Number of workers with a copy queue.
    copies: u32,
    /// TCP connections passed to the daemon, and their peers.
    sockets: Vec<(TcpStream, TcpStream)>,
}

impl Objects {
    /// Returns the STag of a window, for requests that need one.
    pub(super) fn window(&self, rng: &mut Rng) -> Option<Stag> {
        pick(&self.windows, rng).map(|(_, stag)| stag)
    }
}

impl Session {
    /// Misuses one of these objects. Returns `None` when the session has ended.
    pub(super) fn misuse_objects(&mut self, rng: &mut Rng) -> Option<()> {
        match rng.below(12) {
            0..=1 => self.alloc_window(rng)?,
            2 => {
                let window = pick(&self.objects.windows, rng).map_or(MwId(7), |(window, _)| window);
                let _ = self.raw.try_call(RequestBody::DeallocWindow { window }, &[])?;
            }
            3..=4 => {
                self.make_srq(rng)?;
                self.make_qp(rng)?;
            }
            5 => {
                let srq = pick(&self.srqs, rng).unwrap_or(SrqId(7));
                let body = RequestBody::SetContext { object: ObjectRef::Srq(srq), context: 1 };
                let _ = self.raw.try_call(body, &[])?;
            }
            6..=7 => self.attach(rng)?,
            8..=9 => self.pass_socket(rng)?,
            10 => {
                let kinds = [
                    ListKind::Srqs,
                    ListKind::Windows,
                    ListKind::Pds,
                    ListKind::Limits,
                    ListKind::Diagnoses,
                    ListKind::Events,
                ];
                let what = kinds[rng.below(kinds.len() as u64) as usize];
                let from = [0, 1, 31, 1 << 33, rng.word(), u64::MAX][rng.below(6) as usize];
                let _ = self.raw.try_call(RequestBody::List { what, from }, &[])?;
            }
            _ => {
                let _ = self
                    .raw
                    .try_call(RequestBody::Diagnosis { id: rng.word() >> rng.below(64) }, &[])?;
            }
        }
        Some(())
    }

    fn alloc_window(&mut self, rng: &mut Rng) -> Option<()> {
        let kind = [WindowKind::Type1, WindowKind::Type2][rng.below(2) as usize];
        let body = RequestBody::AllocWindow { pd: self.pd, kind };
        if let Ok(ReplyBody::Window { window, stag }) = self.raw.try_call(body, &[])? {
            self.objects.windows.push((window, stag));
        }
        Some(())
    }

    /// Attaches its own memory or a wrong descriptor, then registers valid or invalid addresses.
    fn attach(&mut self, rng: &mut Rng) -> Option<()> {
        if !self.objects.attached || rng.below(8) == 0 {
            let own = || std::fs::File::options().read(true).write(true).open("/proc/self/mem");
            let memory: OwnedFd = match rng.below(8) {
                0 => open("/dev/zero")?,
                1 => open("/proc/self/mem")?,
                2 => open("/proc/self/maps")?,
                _ => own().ok()?.into(),
            };
            let answer = self.raw.try_call(RequestBody::AttachMemory, &[memory.as_fd()])?;
            self.objects.attached |= answer.is_ok();
            // An untrusted user can attach memory only by serving copies.
            let next = self.objects.copies;
            let worker = [next, next, next, rng.word() as u32][rng.below(4) as usize];
            let body = RequestBody::ServeCopies { worker };
            if let Ok(ReplyBody::Copies { queue, .. }) = self.raw.try_call(body, &[])? {
                self.objects.copies += 1;
                self.add_queue(queue);
            }
        }
        let honest = rng.below(2) == 0;
        let (address, length, access) = if honest {
            let address = ATTACHED.as_ptr() as u64;
            let write = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
            (address, size_of_val(&ATTACHED) as u64, write)
        } else {
            // No write access, because peers could overwrite the attacker's own program.
            let address = rng.word() >> rng.below(64);
            (address, rng.word() >> rng.below(64), Access::REMOTE_READ)
        };
        let body = RequestBody::RegMr(MrRequest {
            pd: self.pd,
            source: MrSource::Attached { address },
            length,
            iova: 0x1000,
            access,
            scope: Scope::Pd,
        });
        if let Ok(ReplyBody::Mr { mr, stag }) = self.raw.try_call(body, &[])? {
            self.regions.push((mr, stag));
        }
        Some(())
    }

    /// Passes a TCP connection with arbitrary bytes in it, or another kind of socket.
    fn pass_socket(&mut self, rng: &mut Rng) -> Option<()> {
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let listener = TcpListener::bind(local).ok()?;
        let near = TcpStream::connect(listener.local_addr().ok()?).ok()?;
        let (mut far, _) = listener.accept().ok()?;
        let odd: OwnedFd = match rng.below(8) {
            0 => UdpSocket::bind(local).ok()?.into(),
            1 => listener.into(),
            2 => self.raw.socket.try_clone().ok()?,
            _ => near.try_clone().ok()?.into(),
        };
        let mut noise = match rng.below(2) {
            0 => crate::wire::request(crate::wire::CRC, 1 + rng.below(2) as u8, b"hello"),
            _ => vec![0; rng.below(600) as usize],
        };
        if rng.below(2) == 0 {
            rng.fill(&mut noise);
        }
        let _ = far.write_all(&noise);
        let body = match rng.below(2) {
            0 => RequestBody::ServeOver { context: rng.word() },
            _ => RequestBody::ConnectOver {
                qp: pick(&self.qps, rng)?,
                ird: None,
                ord: None,
                private_data: vec![1; rng.below(600) as usize],
            },
        };
        let _ = self.raw.try_call(body, &[odd.as_fd()])?;
        // Keep using the socket after passing it.
        let _ = near.set_nonblocking(rng.below(2) == 0);
        if rng.below(3) == 0 {
            let _ = (&near).write_all(b"also mine");
        }
        self.objects.sockets.push((near, far));
        if self.objects.sockets.len() > 8 {
            self.objects.sockets.remove(0);
        }
        Some(())
    }
}
