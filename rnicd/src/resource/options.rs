//! Options of the connection manager and the workers, derived from the configuration.

use rnic_abi::shm::wait::WaitPolicy;
use rnic_core::engine::{ChargeLimits, EngineOptions, MulpduPolicy, PartialLimits};
use rnic_core::stream::startup::{Options, RtrKinds};

use super::Capacity;
use crate::cm::{CmOptions, SocketBuffers};
use crate::config::{Config, Kind, Loopback, Mulpdu};
use crate::worker::WorkerOptions;

/// Returns the options of the connection manager.
pub fn cm(config: &Config, capacity: &Capacity) -> CmOptions {
    let mpa = &config.mpa;
    let limits = &config.limits.device;
    let peer = &config.limits.peer;
    let (ird, ord) = config.reads_of_qp();
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
        ports: config.ports.map.clone(),
        direct: config.engine.loopback == Loopback::Direct,
        startups: capacity.startups as usize,
        startups_key: capacity.startups_key(limits.count(Kind::Startups)),
        buffers: SocketBuffers {
            // At most 1 GiB each, by the table of limits.
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

/// Returns the options of the workers and their engines.
pub fn workers(config: &Config, workers: u32) -> WorkerOptions {
    let limits = &config.limits.device;
    // Streams are spread evenly over the workers and never change their worker.
    let share =
        |bytes: u64| usize::try_from(bytes / u64::from(workers.max(1))).unwrap_or(usize::MAX);
    let limits = |device, session| ChargeLimits {
        device: share(limits.of(device)),
        session: share(limits.of(session)),
    };
    WorkerOptions {
        engine: EngineOptions {
            // Each worker fills in its number.
            worker: 0,
            terminate_deadline: config.engine.terminate_deadline,
            close_deadline: config.engine.close_deadline,
            error_deadline: config.engine.error_deadline,
            copy_deadline: config.engine.copy_deadline,
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

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::config::Tcp;
    use crate::config::tests::other_values;

    /// Limits that become options, each with a different value.
    const LIMITS: &str = "
[limits]
startups = 21
ird = 22
ord = 23
socket_send_bytes = \"256KiB\"
socket_receive_bytes = \"257KiB\"
partial_bytes = \"30MiB\"
session_partial_bytes = \"24MiB\"
unsent_bytes = \"27MiB\"
session_unsent_bytes = \"21MiB\"
[limits.peer]
connections_per_second = 24
stag_guesses_per_minute = 25
";

    fn config() -> Config {
        let text = other_values() + LIMITS;
        Config::parse(Path::new("t"), &text).unwrap_or_else(|e| panic!("{e}"))
    }

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn the_connection_manager_has_each_key() {
        let config = config();
        let address = SocketAddr::from(([127, 0, 0, 1], 3260));
        let CmOptions {
            startup,
            max_ird,
            max_ord,
            tcp,
            ports,
            direct,
            startups,
            startups_key,
            buffers,
            peer_connections_per_second,
            stag_guesses_per_minute,
            connect_deadline,
            reply_deadline,
            request_deadline,
            decision_deadline,
            close_deadline,
        } = cm(&config, &Capacity::derive(&config, 1 << 20, 4));
        let expected = Options {
            revision: 1,
            crc: false,
            markers: true,
            rdmac: true,
            peer_to_peer: false,
            ird: 22,
            ord: 23,
            rtr: RtrKinds::all(),
        };
        assert_eq!(format!("{startup:?}"), format!("{expected:?}"));
        assert_eq!((max_ird, max_ord), (22, 23));
        let times = Tcp {
            keepalive: Some(ms(11_000)),
            keepalive_interval: ms(12_000),
            user_timeout: Some(ms(13_000)),
        };
        assert_eq!(tcp, times);
        assert_eq!((ports.tcp_address(address).port(), direct), (13_260, false));
        assert_eq!((startups, startups_key.as_str()), (21, "limits.startups"));
        assert_eq!((buffers.send, buffers.receive), (256 << 10, 257 << 10));
        assert_eq!((peer_connections_per_second, stag_guesses_per_minute), (24, 25));
        assert_eq!((connect_deadline, reply_deadline), (ms(1004), ms(1006)));
        assert_eq!((request_deadline, decision_deadline), (ms(1005), ms(1007)));
        assert_eq!(close_deadline, ms(1002));
    }

    #[test]
    fn each_worker_has_each_key_and_its_share() {
        let WorkerOptions { engine, seccomp, wait } = workers(&config(), 3);
        let EngineOptions {
            worker: _,
            terminate_deadline,
            close_deadline,
            error_deadline,
            copy_deadline,
            first_fpdu_deadline,
            mulpdu,
            partial: PartialLimits { bytes, stall },
            unsent,
            diagnoses: _,
        } = engine;
        assert_eq!((terminate_deadline, close_deadline), (ms(1001), ms(1002)));
        assert_eq!(error_deadline, ms(501));
        assert_eq!((copy_deadline, first_fpdu_deadline), (ms(1003), ms(1008)));
        assert_eq!((mulpdu, stall), (MulpduPolicy::Max, ms(1010)));
        assert_eq!((bytes.device, bytes.session), (10 << 20, 8 << 20));
        assert_eq!((unsent.device, unsent.session), (9 << 20, 7 << 20));
        assert_eq!(seccomp, crate::config::Seccomp::Log);
        assert_eq!((wait.spins, wait.yield_for), (101, Duration::from_micros(51)));
    }
}
