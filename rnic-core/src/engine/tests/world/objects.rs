//! Objects that the resource manager creates for clients: queues, QPs, regions, windows.

use super::*;

impl World {
    pub fn id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id
    }

    pub fn app(&mut self, host: usize) -> usize {
        let user = UserId(self.id());
        self.app_of(host, user)
    }

    /// Creates a session of this user.
    pub fn app_of(&mut self, host: usize, user: UserId) -> usize {
        let (arena, _fd) = Mapping::create_arena("test", 512 << 10).unwrap();
        let session = SessionId(self.id());
        let pd = PdId(self.id());
        let mut ringers = Vec::new();
        for (worker, engine) in (0..).zip(self.hosts[host].clone()) {
            let scanner = DoorbellScanner::new(arena.clone(), worker).unwrap();
            self.engines[engine].attach_session(session, user, scanner, self.now);
            ringers.push((engine, DoorbellRinger::new(arena.clone(), worker).unwrap()));
        }
        self.apps.push(App {
            session,
            pd,
            host,
            arena,
            next_offset: PAGE * 8,
            next_doorbell: 1,
            ringers,
            cqs: Vec::new(),
            srqs: Vec::new(),
            events: Vec::new(),
            notified: Vec::new(),
        });
        self.apps.len() - 1
    }

    fn queue(&mut self, app: usize, kind: QueueKind, shape: QueueShape, owner: u32) -> QueueMemory {
        let app = &mut self.apps[app];
        let offset = app.next_offset;
        app.next_offset += shape.bytes().next_multiple_of(64);
        let doorbell = app.next_doorbell;
        QueueMemory::format(app.arena.clone(), offset, kind, shape, owner, doorbell).unwrap()
    }

    fn client_end(&self, app: usize, queue: &QueueMemory, offset: usize) -> QueueMemory {
        let arena = self.apps[app].arena.clone();
        QueueMemory::open(arena, offset, queue.kind(), queue.shape()).unwrap()
    }

    pub fn cq(&mut self, app: usize, entries: u32) -> usize {
        self.new_cq(app, entries, false)
    }

    /// Creates a CQ that send completions without a free entry overrun.
    pub fn cq_overrun_by_sends(&mut self, app: usize, entries: u32) -> usize {
        self.new_cq(app, entries, true)
    }

    fn new_cq(&mut self, app: usize, entries: u32, overrun_by_sends: bool) -> usize {
        let id = CqId(self.id());
        let offset = self.apps[app].next_offset;
        let shape = QueueShape::completion(entries);
        let queue = self.queue(app, QueueKind::Completion, shape, id.0);
        let consumer = CompletionConsumer::new(self.client_end(app, &queue, offset));
        self.apps[app].next_doorbell += 1;
        let cq = Cq::new(id, self.apps[app].session, 7, queue);
        let cq = Arc::new(cq.with_overrun_by_sends(overrun_by_sends));
        self.apps[app].cqs.push(CqEnd { cq, consumer });
        self.apps[app].cqs.len() - 1
    }

    /// Creates a shared receive queue.
    pub fn srq(&mut self, app: usize, depth: u32, limit: u32) -> usize {
        let id = SrqId(self.id());
        let offset = self.apps[app].next_offset;
        let shape = QueueShape::receive(depth, 4);
        let queue = self.queue(app, QueueKind::SharedReceive, shape, id.0);
        let producer = ReceiveProducer::new(self.client_end(app, &queue, offset));
        self.apps[app].next_doorbell += 1;
        let srq = Arc::new(Srq::new(id, self.apps[app].session, 8, limit, queue));
        self.apps[app].srqs.push(SrqEnd { srq, producer });
        self.apps[app].srqs.len() - 1
    }

    /// Posts receives without SGEs to a shared receive queue.
    pub fn srq_recv(&mut self, app: usize, srq: usize, ids: Range<u64>) {
        let end = &mut self.apps[app].srqs[srq];
        for id in ids {
            end.producer.push(id, &[]).unwrap();
        }
        end.producer.publish();
        let waiting = end.producer.waits();
        let index = end.srq.doorbell();
        for worker in (0..64).filter(|w| waiting >> w & 1 == 1) {
            self.ring(app, worker, index);
        }
    }

    pub fn qp(&mut self, app: usize, send_cq: usize, recv_cq: usize, shape: QpShape) -> usize {
        let id = QpId(self.id());
        let at = self.apps[app].next_offset;
        let sq_shape = QueueShape::send(shape.sq, shape.sges, shape.inline);
        let sq = self.queue(app, QueueKind::Send, sq_shape, id.0);
        let sq_end = self.client_end(app, &sq, at);
        let (rq, rq_end) = match shape.srq {
            Some(srq) => {
                let srq = &self.apps[app].srqs[srq].srq;
                srq.qps.fetch_add(1, Relaxed);
                (Receives::Shared(srq.clone()), None)
            }
            None => {
                let at = self.apps[app].next_offset;
                let rq_shape = QueueShape::receive(shape.rq, shape.sges);
                let rq = self.queue(app, QueueKind::Receive, rq_shape, id.0);
                let rq_end = self.client_end(app, &rq, at);
                (Receives::Own(ReceiveConsumer::new(rq)), Some(ReceiveProducer::new(rq_end)))
            }
        };
        let doorbell = self.apps[app].next_doorbell;
        self.apps[app].next_doorbell += 1;
        let shared = Arc::new(QpShared::default());
        let a = &self.apps[app];
        let config = QpConfig {
            qp: id,
            session: a.session,
            pd: a.pd,
            doorbell,
            sq: SendConsumer::new(sq),
            rq,
            send_cq: a.cqs[send_cq].cq.clone(),
            recv_cq: a.cqs[recv_cq].cq.clone(),
            signal_all: shape.signal_all,
            rnr_timeout: shape.rnr_timeout,
            wiring: None,
            unreliable: shape.unreliable,
            datagrams: None,
            shared: shared.clone(),
            faults: Vec::new(),
            stopped: None,
        };
        self.qps.push(QpEnd {
            app,
            id,
            sq: SendProducer::new(sq_end),
            rq: rq_end,
            send_cq,
            recv_cq,
            shared,
            doorbell,
            engine: usize::MAX,
            config: Some(Box::new(config)),
        });
        self.qps.len() - 1
    }

    /// Creates a region with its own memory, at an address in the middle of the address space.
    pub fn mr(&mut self, qp: usize, len: usize, access: Access) -> Mr {
        let iova = 0x7000_0000_0000 + u64::from(self.next_id) * 0x10_0000;
        self.mr_at(qp, len, access, Scope::Pd, iova)
    }

    /// Creates a region with all rights.
    pub fn any_mr(&mut self, qp: usize, len: usize) -> Mr {
        let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        self.mr(qp, len, Access::LOCAL_WRITE | remote)
    }

    /// Installs a region with all rights over a part of a mapping.
    pub fn install_at(
        &mut self,
        qp: usize,
        mapping: &Arc<Mapping>,
        offset: usize,
        len: usize,
        iova: u64,
    ) -> Stag {
        let memory = Memory::Shared { mapping: mapping.clone(), offset };
        let access = Access::all() - Access::ZERO_BASED;
        self.install(qp, memory, len, access, Scope::Pd, iova).0
    }

    pub fn own_mr(&mut self, qp: usize, len: usize, access: Access) -> Mr {
        let scope = Scope::Qp(self.qps[qp].id);
        self.mr_at(qp, len, access, scope, 0x1000)
    }

    pub fn mr_at(&mut self, qp: usize, len: usize, access: Access, scope: Scope, iova: u64) -> Mr {
        let (mapping, _fd) = Mapping::create_arena("mr", len.max(1)).unwrap();
        self.mr_over(qp, mapping, len, access, scope, iova)
    }

    pub fn mr_over(
        &mut self,
        qp: usize,
        mapping: Arc<Mapping>,
        len: usize,
        access: Access,
        scope: Scope,
        iova: u64,
    ) -> Mr {
        let address = mapping.address();
        let memory = match self.kind {
            MemoryKind::Shared => Memory::Shared { mapping: mapping.clone(), offset: 0 },
            MemoryKind::Attached => Memory::Attached { space: own_address_space(), address },
            MemoryKind::ThroughCopier => Memory::ThroughCopier { copier: self.copier(qp), address },
        };
        let (stag, windows) = self.install(qp, memory, len, access, scope, iova);
        Mr { stag, iova, len, mapping, windows }
    }

    /// Creates a region limited to the QP, with an STag chosen by the test, such as a recorded one.
    pub fn mr_as(&mut self, qp: usize, stag: Stag, iova: u64, len: usize, access: Access) -> Mr {
        let (mapping, _fd) = Mapping::create_arena("mr", len.max(1)).unwrap();
        let memory = Memory::Shared { mapping: mapping.clone(), offset: 0 };
        let scope = Scope::Qp(self.qps[qp].id);
        let windows = self.install_as(stag, qp, memory, len, access, scope, iova);
        Mr { stag, iova, len, mapping, windows }
    }

    /// Returns the copier of a QP's session.
    pub fn copier(&mut self, qp: usize) -> Arc<Copier> {
        let app = self.qps[qp].app;
        let session = self.apps[app].session;
        let workers = self.hosts[self.apps[app].host].len();
        let new = || Copier::new(session, workers as u32);
        self.copiers.entry(app).or_insert_with(new).clone()
    }

    /// Carries out one copy job. Returns true if there was one.
    pub fn run_copy_job(&mut self) -> bool {
        let Some((engine, job)) = self.copy_jobs.pop_front() else { return false };
        let space = own_address_space();
        let mut at = 0;
        let result = match job.direction {
            Direction::Out => {
                let mut bytes = vec![0; job.pieces.iter().map(|(_, n)| *n as usize).sum()];
                let mut read = || {
                    for (address, len) in &job.pieces {
                        let len = *len as usize;
                        space.read(*address, &mut bytes[at..at + len])?;
                        at += len;
                    }
                    Ok::<_, rnic_abi::shm::attached::AttachedFault>(())
                };
                read().map(|()| bytes)
            }
            Direction::Update(operation) => {
                let old = space.update_u64(job.pieces[0].0, |old| operation.applied_to(old));
                old.map(|old| old.to_ne_bytes().to_vec())
            }
            Direction::In { bytes, tail_last } => {
                let mut write = || {
                    for (address, len) in &job.pieces {
                        let len = *len as usize;
                        space.write(*address, &bytes[at..at + len], tail_last)?;
                        at += len;
                    }
                    Ok(Vec::new())
                };
                write()
            }
        };
        let now = self.now;
        self.engines[engine].handle_copied(&job.copier, job.id, result.map_err(Into::into), now);
        true
    }

    /// Installs a region on all workers of the QP's host.
    pub fn install(
        &mut self,
        qp: usize,
        memory: Memory,
        len: usize,
        access: Access,
        scope: Scope,
        iova: u64,
    ) -> (Stag, Arc<WindowCount>) {
        let stag = self.stags.allocate().unwrap();
        (stag, self.install_as(stag, qp, memory, len, access, scope, iova))
    }

    /// Like `install`, with an STag chosen by the test.
    #[expect(clippy::too_many_arguments, reason = "the fields of a table entry")]
    pub fn install_as(
        &mut self,
        stag: Stag,
        qp: usize,
        memory: Memory,
        len: usize,
        access: Access,
        scope: Scope,
        iova: u64,
    ) -> Arc<WindowCount> {
        let app = &self.apps[self.qps[qp].app];
        let windows = Arc::new(WindowCount::default());
        let entry = StagEntry {
            stag,
            kind: StagKind::Region(windows.clone()),
            mr: MrId(self.next_id + 1),
            session: app.session,
            pd: app.pd,
            scope,
            access,
            iova,
            length: len as u64,
            memory,
        };
        self.command_host(qp, || EngineCommand::InstallStag(entry.clone()));
        self.id();
        windows
    }

    /// Creates a window of a QP's domain, as the resource manager does.
    pub fn window(&mut self, qp: usize, kind: WindowKind) -> Arc<Window> {
        let stag = self.stags.allocate().unwrap();
        let id = MwId(self.id());
        let app = &self.apps[self.qps[qp].app];
        let window = Arc::new(Window::new(id, app.session, app.pd, kind, stag));
        self.command_host(qp, || EngineCommand::AddWindow(window.clone()));
        window
    }

    /// Deallocates a window, as the resource manager does.
    pub fn remove_window(&mut self, qp: usize, window: &Arc<Window>) {
        self.command_host(qp, || EngineCommand::RemoveWindow(window.clone()));
        window.close();
    }

    /// Deregisters a region as the resource manager does. Returns the number of bound windows if
    /// they prevent it.
    pub fn dereg(&mut self, qp: usize, mr: &Mr) -> Result<(), u32> {
        mr.windows.withdraw()?;
        self.revoke(qp, mr.stag);
        Ok(())
    }

    pub fn revoke(&mut self, qp: usize, stag: Stag) {
        self.command_host(qp, || EngineCommand::RevokeStag(stag));
    }
}
