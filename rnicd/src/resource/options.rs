//! The configuration as the connection manager and the workers take it: plain numbers.

use rnic_core::engine::{ChargeLimits, EngineOptions, MulpduPolicy, PartialLimits};
use rnic_core::shm::wait::WaitPolicy;
use rnic_core::stream::startup::{Options, RtrKinds};

use super::Capacity;
use crate::cm::{CmOptions, SocketBuffers};
use crate::config::{Config, Kind, Loopback, Mulpdu};
use crate::worker::WorkerOptions;

/// For the connection manager.
pub fn cm(config: &Config, capacity: &Capacity) -> CmOptions {
    let (mpa, limits) = (&config.mpa, &config.limits.device);
    let peer = &config.limits.peer;
    let (ird, ord) = config.limits.reads_of_qp();
    CmOptions {
        startup: Options {
            revision: mpa.revision,
            crc: mpa.crc,
            markers: mpa.markers,
            rdmac: mpa.rdmac,
            peer_to_peer: mpa.peer_to_peer,
            ird,
            ord,
            rtr: RtrKinds::all(),
        },
        max_ird: ird,
        max_ord: ord,
        tcp: config.tcp,
        ports: config.ports.clone(),
        direct: config.engine.loopback == Loopback::Direct,
        startups: capacity.startups as usize,
        startups_key: capacity.startups_key(limits.count(Kind::Startups)),
        buffers: SocketBuffers {
            // The table bounds them to 1 GiB.
            send: limits.count(Kind::SocketSendBytes),
            receive: limits.count(Kind::SocketReceiveBytes),
        },
        peer_connections_per_second: peer.count(Kind::ConnectionsPerSecond),
        stag_guesses_per_minute: peer.count(Kind::StagGuessesPerMinute),
        connect_deadline: mpa.connect_deadline,
        reply_deadline: mpa.reply_deadline,
        request_deadline: mpa.startup_deadline,
        decision_deadline: mpa.decision_deadline,
        close_deadline: config.engine.close_deadline,
    }
}

/// For the workers and their engines.
pub fn workers(config: &Config, workers: u32) -> WorkerOptions {
    let limits = &config.limits.device;
    // Streams belong to workers for life, and are spread evenly.
    let share =
        |bytes: u64| usize::try_from(bytes / u64::from(workers.max(1))).unwrap_or(usize::MAX);
    let limits = |device, session| ChargeLimits {
        device: share(limits.of(device)),
        session: share(limits.of(session)),
    };
    WorkerOptions {
        engine: EngineOptions {
            // Filled in for each worker.
            worker: 0,
            terminate_deadline: config.engine.terminate_deadline,
            close_deadline: config.engine.close_deadline,
            copier_deadline: config.engine.copier_deadline,
            first_fpdu_deadline: config.mpa.first_fpdu_deadline,
            partial: PartialLimits {
                bytes: limits(Kind::PartialBytes, Kind::SessionPartialBytes),
                stall: config.mpa.stall_deadline,
            },
            unsent: limits(Kind::UnsentBytes, Kind::SessionUnsentBytes),
            mulpdu: match config.mpa.mulpdu {
                Mulpdu::Mss => MulpduPolicy::Emss,
                Mulpdu::Max => MulpduPolicy::Max,
            },
            diagnoses: Default::default(),
        },
        seccomp: config.control.seccomp,
        wait: WaitPolicy { spins: config.engine.spins, yield_for: config.engine.yield_for },
    }
}
