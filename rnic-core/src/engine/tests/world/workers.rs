//! The workers: they run the engines, act on their outputs, and move bytes over links.

use super::*;

impl World {
    /// Runs until nothing is left to do. The clock advances only for the latency of the links.
    pub fn settle(&mut self) {
        for _ in 0..1_000_000 {
            if self.round() {
                continue;
            }
            // Workers sleep unless a doorbell was rung.
            if self.engines.iter_mut().any(|e| e.has_work() || !e.prepare_sleep()) {
                continue;
            }
            let arrivals = self.links.iter().flat_map(|l| &l.pipes);
            let Some(at) =
                arrivals.filter_map(|p| p.next_arrival()).filter(|t| *t > self.now).min()
            else {
                return;
            };
            self.now = at;
        }
        panic!("the engines are still busy after a million rounds");
    }

    /// Lets time pass.
    pub fn advance(&mut self, by: Duration) {
        let until = self.now.after(by);
        loop {
            match self.next_timeout() {
                Some(at) if at <= until => self.now = at.max(self.now),
                _ => break,
            }
            for engine in &mut self.engines {
                engine.handle_timeout(self.now);
            }
            self.settle();
        }
        self.now = self.now.max(until);
        self.settle();
    }

    pub fn next_timeout(&self) -> Option<Time> {
        self.engines.iter().filter_map(Engine::poll_timeout).min()
    }

    /// Runs one round of every worker. Returns true if anything happened.
    pub fn round(&mut self) -> bool {
        let mut worked = false;
        for engine in 0..self.engines.len() {
            worked |= self.engines[engine].poll_doorbells(self.now);
            for _ in 0..16 {
                worked |= self.engines[engine].has_work();
                match self.engines[engine].poll_work(self.now) {
                    Some(Work::Transmit(qp)) => self.transmit(engine, qp),
                    Some(Work::Receive(qp)) => {
                        if self.receive(engine, qp) == Some(Receive::Progress) {
                            self.engines[engine].handle_readable(qp);
                        }
                    }
                    Some(Work::TurnTaken) => {}
                    None => break,
                }
            }
            worked |= self.carry_out(engine);
        }
        if !self.network.holds && self.deliver_packets() {
            worked = true;
        }
        if self.answer_copies && self.run_copy_job() {
            worked = true;
            for engine in 0..self.engines.len() {
                self.carry_out(engine);
            }
        }
        for link in 0..self.links.len() {
            for end in 0..2 {
                worked |= self.serve(link, end);
            }
        }
        worked
    }

    /// Returns the link and end of a QP's socket, unless it is closed.
    pub fn link_of(&self, engine: usize, qp: QpId) -> Option<(usize, usize)> {
        let wanted = End::Qp { engine, qp };
        (0..self.links.len())
            .find_map(|l| self.links[l].ends.iter().position(|e| *e == wanted).map(|end| (l, end)))
    }

    pub fn transmit(&mut self, engine: usize, qp: QpId) {
        let now = self.now;
        let emss = self.emss;
        let Some((l, end)) = self.link_of(engine, qp) else { return };
        let link = &mut self.links[l];
        let mut shared_bytes = 0;
        let sent = self.engines[engine].transmit(qp, now, emss, |batch| {
            let mut bytes = Vec::new();
            for piece in batch.pieces() {
                match piece {
                    Piece::Private(p) => bytes.extend_from_slice(p),
                    Piece::Shared { mapping, offset, len } => {
                        let from = bytes.len();
                        bytes.resize(from + len, 0);
                        shared_bytes += len;
                        // As in `send_pieces`.
                        if mapping.read(*offset, &mut bytes[from..]).is_err() {
                            return Err(std::io::Error::from_raw_os_error(libc::EFAULT));
                        }
                    }
                }
            }
            link.send(end, &bytes, now)
        });
        self.shared_bytes += shared_bytes;
        if sent != Transmit::Blocked {
            self.links[l].pipes[end].blocked = false;
        }
    }

    /// Handles a readable or writable socket.
    fn serve(&mut self, link: usize, end: usize) -> bool {
        let now = self.now;
        let End::Qp { engine, qp } = self.links[link].ends[end] else { return false };
        let mut worked = false;
        let out = &mut self.links[link].pipes[end];
        if out.blocked && out.has_room() {
            out.blocked = false;
            self.engines[engine].handle_writable(qp);
            worked = true;
        }
        if self.paused.contains(&(link, end)) {
            // An error that the kernel reports without a read.
            if let Some(error) = self.links[link].pipes[1 - end].take_error() {
                self.engines[engine].handle_socket_error(qp, &error, now);
                self.carry_out(engine);
                return true;
            }
            return worked;
        }
        if self.links[link].pipes[1 - end].is_readable(now) {
            worked |= self.receive(engine, qp) != Some(Receive::WouldBlock);
            worked |= self.carry_out(engine);
        }
        worked
    }

    /// Reads a QP's socket once, unless it is closed, paused or stopped.
    fn receive(&mut self, engine: usize, qp: QpId) -> Option<Receive> {
        let now = self.now;
        let (link, end) = self.link_of(engine, qp)?;
        if self.paused.contains(&(link, end)) {
            return None;
        }
        if self.engines[engine].is_stopped(qp) {
            // A stopped QP has no turns in which a worker would read.
            return Some(Receive::WouldBlock);
        }
        let inbound = &mut self.links[link].pipes[1 - end];
        let received = self.engines[engine].receive(qp, now, |buffers| {
            let mut into: Vec<&mut [u8]> = buffers.iter_mut().map(|b| &mut b[..]).collect();
            inbound.recv(&mut into, now)
        });
        if received == Receive::Blocked {
            self.paused.push((link, end));
        }
        Some(received)
    }

    /// Acts on the outputs of an engine.
    pub fn carry_out(&mut self, engine: usize) -> bool {
        let mut worked = false;
        while let Some(output) = self.engines[engine].poll_output() {
            worked = true;
            match output {
                Output::Event { session, event } => {
                    let app = self.apps.iter_mut().find(|a| a.session == session).unwrap();
                    app.events.push(event);
                }
                Output::NotifyCq(cq) => {
                    let app = self.apps.iter_mut().find(|a| a.session == cq.session()).unwrap();
                    app.notified.push(cq.id());
                }
                Output::ShutdownWrite(qp) => {
                    let (l, end) = self.link_of(engine, qp).expect("the socket is open");
                    self.links[l].pipes[end].finish(self.now);
                }
                Output::FinalFpdu { qp, bytes } => {
                    let (l, end) = self.link_of(engine, qp).expect("the socket is open");
                    let _ = self.links[l].send(end, &bytes, self.now);
                }
                Output::Close { qp, reset } => {
                    let (l, end) = self.link_of(engine, qp).expect("the socket is open");
                    self.links[l].close(end, reset, self.now);
                }
                Output::InError(qp) => self.in_error.push(qp),
                Output::SendDatagram { from, to, packet } => self.network.send(from, to, packet),
                Output::ReadAgain(qp) => {
                    let of = self.link_of(engine, qp);
                    self.paused.retain(|at| Some(*at) != of);
                }
                Output::Warning { text, .. } => self.warnings.push(text),
                Output::Notification(notification) => self.notified(notification),
                Output::Broadcast(request) => self.broadcast(engine, request),
                Output::Copy(job) => self.copy_jobs.push_back((engine, job)),
            }
        }
        if self.answer_changes && !self.changes.is_empty() {
            worked |= self.answer();
        }
        worked
    }

    /// Queues an STag change, or wakes workers of the host.
    fn broadcast(&mut self, engine: usize, request: Broadcast) {
        match request {
            Broadcast::ChangeStags { qp, change } => self.changes.push((engine, qp, *change)),
            Broadcast::Freed { freed, workers } => {
                let host = self.hosts.iter().find(|h| h.contains(&engine)).unwrap().clone();
                for worker in (0..host.len()).filter(|n| workers >> n & 1 == 1) {
                    let command = EngineCommand::Wake(freed.clone());
                    self.engines[host[worker]].handle_command(command, self.now);
                }
            }
        }
    }

    /// Records a notification for the resource manager.
    fn notified(&mut self, notification: Notification) {
        match notification {
            Notification::FaultStruck { fault, qp } => self.struck.push((fault, qp)),
            Notification::CqFailed(cq) => self.failed_cqs.push(cq),
            Notification::SrqFailed(srq) => self.failed_srqs.push(srq),
            Notification::StagGuessed { peer, .. } => self.guesses.push(peer),
            Notification::Misbehaved { session, why } => self.misbehaved.push((session, why)),
            Notification::Note { session, kind, .. } => self.notes.push((session, kind)),
            Notification::Detached { session } => self.detached.push(session),
            Notification::Unlinked { qp } => self.unlinked.push(qp),
            Notification::CommunicationEstablished { qp } => self.established.push(qp),
        }
    }

    /// Applies each STag change on every worker, and then reports it as done unless a copier still
    /// has a job for the memory. Returns true if any change was done.
    pub fn answer(&mut self) -> bool {
        let mut said = false;
        for (engine, qp, change) in std::mem::take(&mut self.changes) {
            let host = self.hosts.iter().find(|h| h.contains(&engine)).unwrap().clone();
            for other in host {
                let command = EngineCommand::ChangeStags(change.clone());
                self.engines[other].handle_command(command, self.now);
            }
            let at_work =
                |copier| self.copy_jobs.iter().any(|(_, job)| Arc::ptr_eq(&job.copier, copier));
            if change.copier().is_some_and(at_work) {
                self.changes.push((engine, qp, change));
                continue;
            }
            change.settle();
            self.engines[engine].handle_command(EngineCommand::StagsChanged(qp), self.now);
            said = true;
        }
        said
    }
}
