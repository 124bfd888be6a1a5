//! Cases: programs, the command lines of their ends, and the expected output.

/// A program with one set of options.
pub struct Case {
    /// Command line of the client, or of the only process.
    pub client: &'static str,
    /// The server, or `None` if there is only one process.
    pub server: Option<Server>,
    /// Texts that the client must print.
    pub client_says: &'static [&'static str],
    /// Minimum number of payload bytes that the daemons must place.
    pub bytes: u64,
}

/// The server of a case.
///
/// In commands, `{port}` is the port that the test chose, and `{ip}` the server's address. A line
/// of the output must contain each expected text, after each run of white space in the line is
/// replaced with one space. `^` matches the start of the line.
pub struct Server {
    /// Command line of the server.
    pub command: &'static str,
    /// Texts that it must print.
    pub says: &'static [&'static str],
    /// How the test detects that the server is ready.
    pub ready: Ready,
    /// How the server ends.
    pub end: End,
}

/// How the test detects that a server is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// Its daemon lists a listener at the port.
    Listener,
    /// Its daemon lists a listener at this port, which the program cannot choose.
    ListenerAt(u16),
    /// It listens on the TCP port itself, to exchange connection data.
    Tcp,
}

/// How a server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It exits with success after the client is done.
    Itself,
    /// It is killed after the client is done.
    Killed,
}

/// Where both ends run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// One daemon, the direct path, and one user.
    Direct,
    /// Two hosts, each with a daemon, over TCP.
    Tcp,
    /// One daemon and two users, whose libraries copy the data.
    Users,
}

impl Setting {
    /// All settings.
    pub const ALL: [Setting; 3] = [Setting::Direct, Setting::Tcp, Setting::Users];
}

/// Cases of one package, which share daemons.
pub struct Group {
    /// A program of the package. Without it the group is skipped.
    pub program: &'static str,
    /// The Debian package.
    pub package: &'static str,
    /// Property of all cases for the heading, or empty.
    pub manner: &'static str,
    /// Devices that the programs see (`RNIC_DEVICES`), or empty for both.
    pub devices: &'static str,
    /// Further configuration of the daemons.
    pub config: &'static str,
    /// Cases in the order in which they run.
    pub cases: &'static [Case],
}

impl Case {
    /// A client and a server that exits by itself.
    const fn pair(client: &'static str, server: &'static str) -> Self {
        let server =
            Server { command: server, says: &[], ready: Ready::Listener, end: End::Itself };
        Case { client, server: Some(server), client_says: &[], bytes: 1 }
    }

    /// A single process.
    const fn alone(client: &'static str) -> Self {
        Case { client, server: None, client_says: &[], bytes: 0 }
    }

    const fn client_says(mut self, says: &'static [&'static str]) -> Self {
        self.client_says = says;
        self
    }

    const fn server_says(mut self, says: &'static [&'static str]) -> Self {
        if let Some(server) = &mut self.server {
            server.says = says;
        }
        self
    }

    /// Texts that both ends must print.
    const fn both_say(self, says: &'static [&'static str]) -> Self {
        self.client_says(says).server_says(says)
    }

    const fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }

    const fn killed(mut self) -> Self {
        if let Some(server) = &mut self.server {
            server.end = End::Killed;
        }
        self
    }

    /// Sets the port that the server listens on.
    const fn at(mut self, port: u16) -> Self {
        if let Some(server) = &mut self.server {
            server.ready = Ready::ListenerAt(port);
        }
        self
    }

    /// The server exchanges connection data with the client over TCP.
    const fn over_tcp(mut self) -> Self {
        if let Some(server) = &mut self.server {
            server.ready = Ready::Tcp;
        }
        self
    }
}

/// All groups.
pub const GROUPS: &[&Group] = &[
    &DEVICES,
    &STATUS,
    &RDMACM,
    &PERFTEST,
    &NEW_POST,
    &FIO,
    &QPERF,
    &FABRIC,
    &PINGPONG,
    &ROCE_PERFTEST,
    &UCX,
    &ROCE_RDMACM,
    &ROCE_RDMACM_PERFTEST,
    &ROCE_FABRIC,
    &ROCE_UCX,
];

/// Programs that list devices.
pub const DEVICES: Group = Group {
    program: "ibv_devinfo",
    package: "ibverbs-utils",
    manner: "",
    devices: "",
    config: "",
    cases: &[
        Case::alone("ibv_devices").client_says(&["^rnicd1 ", "^rnicd0 "]),
        Case::alone("ibv_devinfo -v -d rnicd1").client_says(&[
            "^hca_id: rnicd1",
            "^transport: InfiniBand (0)",
            "^link_layer: Ethernet",
            "RoCE v2",
        ]),
        Case::alone("ibv_devinfo -v").client_says(&[
            "^hca_id: rnicd0",
            "^transport: iWARP (1)",
            "^state: PORT_ACTIVE (4)",
        ]),
    ],
};

/// Programs that read the kernel's device files.
pub const STATUS: Group = Group {
    program: "ibstat",
    package: "infiniband-diags",
    manner: "",
    devices: "",
    config: "",
    cases: &[
        Case::alone("ibstat rnicd1").client_says(&[
            "^CA 'rnicd1'",
            "^State: Active",
            "^Physical state: LinkUp",
            "^Rate: 100",
        ]),
        Case::alone("ibstatus").client_says(&[
            "^Infiniband device 'rnicd1' port 1 status:",
            "^state: 4: ACTIVE",
            "^link_layer: Ethernet",
        ]),
    ],
};

/// The utilities of librdmacm.
pub const RDMACM: Group = Group {
    program: "rping",
    package: "rdmacm-utils",
    manner: "",
    devices: "",
    config: "",
    cases: &[
        Case::pair(
            "rping -c -a {ip} -p {port} -C 10 -v -V",
            "rping -s -a {ip} -p {port} -C 10 -v -V",
        )
        .client_says(&["^ping data: rdma-ping-9: JKLMNOP"])
        .server_says(&["^server ping data: rdma-ping-9: JKLMNOP"])
        .bytes(2 * 10 * 64),
        Case::pair(
            "rping -c -a {ip} -p {port} -C 10 -v -V -S 4000",
            "rping -s -P -a {ip} -p {port} -v -S 4000",
        )
        .client_says(&["^ping data: rdma-ping-9: JKLMNOP"])
        .server_says(&["^server ping data: rdma-ping-9: JKLMNOP"])
        .bytes(2 * 10 * 4000)
        .killed(),
        Case::pair(
            "rping -c -q -a {ip} -p {port} -C 10 -v -V",
            "rping -s -q -a {ip} -p {port} -C 10 -v -V",
        )
        .client_says(&["^ping data: rdma-ping-9: JKLMNOP"])
        .server_says(&["^server ping data: rdma-ping-9: JKLMNOP"])
        .bytes(2 * 10 * 64),
        Case::pair(
            "ucmatose -s {ip} -p {port} -c 4 -C 20",
            "ucmatose -b {ip} -p {port} -c 4 -C 20",
        )
        .both_say(&["^data transfers complete", "^test complete", "^return status 0"])
        .bytes(2 * 4 * 20 * 100),
        Case::pair("udaddy -s {ip} -c 4 -C 10", "udaddy -b {ip} -c 4 -C 10")
            .at(7174)
            .both_say(&["^data transfers complete", "^test complete", "^return status 0"])
            .bytes(2 * 4 * 10 * 100),
        Case::pair("cmtime -s {ip} -p {port} -c 10", "cmtime -b {ip} -p {port} -c 10")
            .client_says(&["^connect :", "^disconnect :", "^destroy :"])
            .bytes(0)
            .killed(),
        Case::pair("rdma_client -s {ip} -p {port}", "rdma_server -s {ip} -p {port}")
            .client_says(&["^rdma_client: end 0"])
            .server_says(&["^rdma_server: end 0"])
            .bytes(2 * 16),
        Case::pair("rdma_xclient -s {ip} -p {port} -c r", "rdma_xserver -p {port} -c r")
            .client_says(&["^rdma_xclient: end 0"])
            .server_says(&["^rdma_xserver: end 0"])
            .bytes(16),
    ],
};

/// A benchmark of perftest: both ends get the same options, and the client or both print a result
/// row.
macro_rules! perftest {
    ($words:literal) => {
        Case::pair(
            concat!("ib_", $words, " -R -F -p {port} {ip}"),
            concat!("ib_", $words, " -R -F -p {port}"),
        )
    };
}

/// Benchmarks of every operation.
pub const PERFTEST: Group = Group {
    program: "ib_write_bw",
    package: "perftest",
    manner: "",
    devices: "",
    config: "",
    cases: &[
        perftest!("send_lat -n 100").client_says(&["^2 100 "]).bytes(2 * 100 * 2),
        perftest!("write_lat -n 100").client_says(&["^2 100 "]).bytes(2 * 100 * 2),
        perftest!("read_lat -n 100").client_says(&["^2 100 "]).bytes(100 * 2),
        perftest!("send_bw -n 100").both_say(&["^65536 100 "]).bytes(100 << 16),
        perftest!("write_bw -n 100").both_say(&["^65536 100 "]).bytes(100 << 16),
        perftest!("read_bw -n 100").both_say(&["^65536 100 "]).bytes(100 << 16),
        perftest!("send_bw -a -n 50")
            .client_says(&["^2 50 ", "^8388608 50 "])
            .bytes(50 * (8 << 20)),
        perftest!("write_bw -a -n 50")
            .client_says(&["^2 50 ", "^8388608 50 "])
            .bytes(50 * (8 << 20)),
        perftest!("read_bw -a -n 50")
            .client_says(&["^2 50 ", "^8388608 50 "])
            .bytes(50 * (8 << 20)),
        perftest!("send_lat -a -n 10")
            .client_says(&["^2 10 ", "^8388608 10 "])
            .bytes(20 * (8 << 20)),
        perftest!("send_lat -e -n 100").client_says(&["^2 100 "]).bytes(2 * 100 * 2),
        perftest!("read_bw -e -n 100").both_say(&["^65536 100 "]).bytes(100 << 16),
        perftest!("write_bw -q 4 -n 100").both_say(&["^65536 400 "]).bytes(400 << 16),
        perftest!("send_bw -b -n 100").both_say(&["^65536 100 "]).bytes(200 << 16),
        perftest!("write_bw -b -n 100").both_say(&["^65536 100 "]).bytes(200 << 16),
        perftest!("write_lat -I 64 -n 100").client_says(&["^2 100 "]).bytes(2 * 100 * 2),
        perftest!("send_bw -l 8 -n 96").both_say(&["^65536 96 "]).bytes(96 << 16),
        perftest!("send_bw --use-srq -n 100").both_say(&["^65536 100 "]).bytes(100 << 16),
        perftest!("atomic_lat -n 100").client_says(&["^8 100 "]).bytes(100 * 8),
        perftest!("atomic_lat -A CMP_AND_SWAP -n 100").client_says(&["^8 100 "]).bytes(100 * 8),
        perftest!("atomic_bw -n 100").both_say(&["^8 100 "]).bytes(100 * 8),
        perftest!("atomic_bw -A CMP_AND_SWAP -e -n 100").both_say(&["^8 100 "]).bytes(100 * 8),
        perftest!("atomic_bw -b -q 4 -n 100").both_say(&["^8 400 "]).bytes(800 * 8),
    ],
};

/// The same programs with a vendor ID and part ID for which they use the `ibv_wr_*` calls. They
/// check the first device, which is not the one that `-R` uses.
pub const NEW_POST: Group = Group {
    program: "ib_write_bw",
    package: "perftest",
    manner: "",
    devices: "",
    config: "[device]\nvendor_id = 0x02c9\nvendor_part_id = 4119\n\
             [wired]\nvendor_id = 0x02c9\nvendor_part_id = 4119\n",
    cases: &[
        perftest!("send_lat -n 90").client_says(&["ibv_wr* API : ON", "^2 90 "]).bytes(2 * 90 * 2),
        perftest!("send_bw -n 90").both_say(&["ibv_wr* API : ON", "^65536 90 "]).bytes(90 << 16),
        perftest!("write_lat -n 90").client_says(&["ibv_wr* API : ON", "^2 90 "]).bytes(2 * 90 * 2),
        perftest!("write_bw -n 90").both_say(&["ibv_wr* API : ON", "^65536 90 "]).bytes(90 << 16),
        perftest!("read_bw -n 90").both_say(&["ibv_wr* API : ON", "^65536 90 "]).bytes(90 << 16),
        perftest!("atomic_lat -n 90").client_says(&["ibv_wr* API : ON", "^8 90 "]).bytes(90 * 8),
        perftest!("atomic_bw -A CMP_AND_SWAP -n 90")
            .both_say(&["ibv_wr* API : ON", "^8 90 "])
            .bytes(90 * 8),
    ],
};

/// An example of rdma-core that connects RC, UC or UD QPs without a connection manager.
macro_rules! pingpong {
    ($words:literal) => {
        Case::pair(
            concat!("ibv_", $words, " -d rnicd1 -g 0 -p {port} {ip}"),
            concat!("ibv_", $words, " -d rnicd1 -g 0 -p {port}"),
        )
        .over_tcp()
    };
}

/// Examples of rdma-core.
pub const PINGPONG: Group = Group {
    program: "ibv_rc_pingpong",
    package: "ibverbs-utils",
    manner: ", RoCE device",
    devices: "",
    config: "",
    cases: &[
        pingpong!("rc_pingpong -n 200").both_say(&["^200 iters in"]).bytes(2 * 200 * 4096),
        pingpong!("rc_pingpong -n 200 -e -c").both_say(&["^200 iters in"]).bytes(2 * 200 * 4096),
        pingpong!("uc_pingpong -n 200").both_say(&["^200 iters in"]).bytes(2 * 200 * 4096),
        pingpong!("ud_pingpong -n 200 -s 1024").both_say(&["^200 iters in"]).bytes(2 * 200 * 1024),
        pingpong!("ud_pingpong -n 200 -s 1024 -e -c").both_say(&["^200 iters in"]).bytes(400 << 10),
        pingpong!("srq_pingpong -n 200 -q 4").both_say(&["^200 iters in"]).bytes(2 * 200 * 4096),
    ],
};

/// A benchmark of perftest that connects its QPs without a connection manager.
macro_rules! roce_perftest {
    ($words:literal) => {
        Case::pair(
            concat!("ib_", $words, " -d rnicd1 -F -p {port} {ip}"),
            concat!("ib_", $words, " -d rnicd1 -F -p {port}"),
        )
        .over_tcp()
    };
}

/// Benchmarks of every operation, without a connection manager.
pub const ROCE_PERFTEST: Group = Group {
    program: "ib_write_bw",
    package: "perftest",
    manner: ", RoCE device",
    devices: "",
    config: "",
    cases: &[
        roce_perftest!("send_lat -n 100").client_says(&["^2 100 "]).bytes(2 * 100 * 2),
        roce_perftest!("write_lat -n 100").client_says(&["^2 100 "]).bytes(2 * 100 * 2),
        roce_perftest!("read_lat -n 100").client_says(&["^2 100 "]).bytes(100 * 2),
        roce_perftest!("send_bw -n 100").both_say(&["^65536 100 "]).bytes(100 << 16),
        roce_perftest!("write_bw -n 100").both_say(&["^65536 100 "]).bytes(100 << 16),
        roce_perftest!("read_bw -n 100").both_say(&["^65536 100 "]).bytes(100 << 16),
        roce_perftest!("send_lat -c UC -n 100").client_says(&["^2 100 "]).bytes(2 * 100 * 2),
        roce_perftest!("send_bw -c UC -n 100").both_say(&["^65536 100 "]).bytes(100 << 16),
        roce_perftest!("send_lat -c UD -n 100").client_says(&["^2 100 "]).bytes(2 * 100 * 2),
        roce_perftest!("send_lat -c UD -n 100 -e -s 1024")
            .client_says(&["^1024 100 "])
            .bytes(200 << 10),
        roce_perftest!("send_bw -c UD -n 100 -s 1024").both_say(&["^1024 100 "]).bytes(100 << 10),
        roce_perftest!("send_bw -c UD -b -n 100 -s 1024")
            .both_say(&["^1024 100 "])
            .bytes(200 << 10),
        roce_perftest!("write_lat -c UC -n 100").client_says(&["^2 100 "]).bytes(2 * 100 * 2),
        roce_perftest!("write_bw -c UC -q 2 -n 100").both_say(&["^65536 200 "]).bytes(200 << 16),
        roce_perftest!("send_bw -c RC -x 0 -a -n 50")
            .client_says(&["^2 50 ", "^8388608 50 "])
            .bytes(50 * (8 << 20)),
        roce_perftest!("read_bw -a -n 50")
            .client_says(&["^2 50 ", "^8388608 50 "])
            .bytes(50 * (8 << 20)),
        roce_perftest!("send_lat -e -n 100").client_says(&["^2 100 "]).bytes(2 * 100 * 2),
        roce_perftest!("write_bw -q 4 -n 100").both_say(&["^65536 400 "]).bytes(400 << 16),
        roce_perftest!("send_bw -b -n 100").both_say(&["^65536 100 "]).bytes(200 << 16),
        roce_perftest!("send_bw --use-srq -n 100").both_say(&["^65536 100 "]).bytes(100 << 16),
        roce_perftest!("atomic_lat -n 100").client_says(&["^8 100 "]).bytes(100 * 8),
        roce_perftest!("atomic_bw -A CMP_AND_SWAP -e -n 100").both_say(&["^8 100 "]).bytes(100 * 8),
        roce_perftest!("atomic_bw -b -q 4 -n 100").both_say(&["^8 400 "]).bytes(800 * 8),
    ],
};

/// A test of UCX's own benchmark with one of its transports.
macro_rules! ucx {
    ($transport:literal, $words:literal) => {
        Case::pair(
            concat!("ucx_perftest -d rnicd1:1 -x ", $transport, " ", $words, " -p {port} {ip}"),
            concat!("ucx_perftest -d rnicd1:1 -x ", $transport, " ", $words, " -p {port}"),
        )
        .over_tcp()
    };
}

/// The same through UCX's public API. It must report that it uses our device with this transport.
macro_rules! ucp {
    ($transports:literal, $words:literal) => {
        Case::pair(
            concat!(
                "env UCX_LOG_LEVEL=info UCX_TLS=",
                $transports,
                " ucx_perftest ",
                $words,
                " -p {port} {ip}"
            ),
            concat!("env UCX_TLS=", $transports, " ucx_perftest ", $words, " -p {port}"),
        )
        .over_tcp()
    };
}

/// UCX, which checks for a character device and for kernel files.
pub const UCX: Group = Group {
    program: "ucx_perftest",
    package: "ucx-utils",
    manner: "",
    devices: "",
    config: "",
    cases: &[
        Case::alone("ucx_info -d").client_says(&[
            "Device: rnicd1:1",
            "Transport: rc_verbs",
            "Transport: ud_verbs",
        ]),
        ucx!("rc_verbs", "-t am_lat -s 8 -n 1000")
            .client_says(&["^Final: 1000 "])
            .bytes(2 * 1000 * 8),
        ucx!("rc_verbs", "-t am_bw -D bcopy -s 4096 -n 1000")
            .client_says(&["^Final: 1000 "])
            .bytes(4096 * 1000),
        ucx!("rc_verbs", "-t put_lat -s 8 -n 1000")
            .client_says(&["^Final: 1000 "])
            .bytes(2 * 1000 * 8),
        ucx!("rc_verbs", "-t put_bw -D zcopy -s 65536 -n 100")
            .client_says(&["^Final: 100 "])
            .bytes(100 << 16),
        ucx!("rc_verbs", "-t get -D zcopy -s 4096 -n 1000")
            .client_says(&["^Final: 1000 "])
            .bytes(4096 * 1000),
        ucx!("rc_verbs", "-t add_mr -n 1000").client_says(&["^Final: 1000 "]).bytes(1000 * 8),
        ucx!("rc_verbs", "-t fadd -n 1000").client_says(&["^Final: 1000 "]).bytes(1000 * 8),
        ucx!("rc_verbs", "-t cswap -n 1000").client_says(&["^Final: 1000 "]).bytes(1000 * 8),
        ucx!("ud_verbs", "-t am_lat -s 8 -n 1000").client_says(&["^Final: 1000 "]).bytes(16 * 1000),
        ucx!("ud_verbs", "-t am_bw -D bcopy -s 1000 -n 1000")
            .client_says(&["^Final: 1000 "])
            .bytes(1000 * 1000),
        // UCX connects RC over UD, so `rc_verbs` alone cannot connect.
        ucp!("rc_verbs,ud_verbs:aux,self", "-t tag_bw -s 4096 -n 1000")
            .client_says(&["tag(rc_verbs/rnicd1:1)", "^Final: 1000 "])
            .bytes(4096 * 1000),
        ucp!("ud_verbs,self", "-t tag_bw -s 4096 -n 1000")
            .client_says(&["tag(ud_verbs/rnicd1:1)", "^Final: 1000 "])
            .bytes(4096 * 1000),
    ],
};

/// An fio job: a client that moves 16 MiB with this verb, and its server.
macro_rules! fio {
    ($verb:literal) => {
        Case::pair(
            concat!(
                "fio --name=client --ioengine=rdma --hostname={ip} --port={port} --verb=",
                $verb,
                " --rw=write --bs=64k --size=16m --iodepth=8"
            ),
            "fio --name=server --ioengine=rdma --port={port} --rw=read --bs=64k --size=16m \
             --iodepth=8",
        )
        .client_says(&["err= 0", "io=16.0MiB (16.8MB)"])
        .server_says(&["err= 0"])
        .bytes(16 << 20)
    };
}

/// fio, which forks its jobs.
pub const FIO: Group = Group {
    program: "fio",
    package: "fio",
    manner: "",
    devices: "",
    config: "",
    cases: &[fio!("write"), fio!("read"), fio!("send")],
};

/// A test of qperf, which also ends its server. qperf runs for one second, in which a busy machine
/// completes few operations, so one message or ten atomics must suffice.
macro_rules! qperf {
    ($test:literal, $says:literal) => {
        qperf!($test, $says, "-m 1000 ", 1000)
    };
    ($test:literal, $says:literal, $options:literal, $bytes:literal) => {
        Case::pair(
            concat!("qperf -lp {port} {ip} -t 1 -cm1 ", $options, $test, " quit"),
            "qperf -lp {port}",
        )
        .over_tcp()
        .client_says(&[concat!("^", $test, ":"), $says])
        .bytes($bytes)
    };
}

/// qperf with a connection manager.
pub const QPERF: Group = Group {
    program: "qperf",
    package: "qperf",
    manner: "",
    devices: "",
    config: "",
    cases: &[
        qperf!("rc_bw", "^bw = ", "", 1000),
        qperf!("rc_bi_bw", "^bw = ", "", 1000),
        qperf!("rc_lat", "^latency = "),
        qperf!("rc_rdma_read_bw", "^bw = ", "", 1000),
        qperf!("rc_rdma_read_lat", "^latency = "),
        // It posts Writes with immediate data.
        qperf!("rc_rdma_write_lat", "^latency = "),
        qperf!("rc_rdma_write_bw", "^bw = ", "", 1000),
        qperf!("rc_fetch_add_mr", "^msg_rate = ", "", 80),
        qperf!("rc_compare_swap_mr", "^msg_rate = ", "", 80),
        // These check the returned values.
        qperf!("ver_rc_fetch_add", "^msg_rate = ", "", 80),
        qperf!("ver_rc_compare_swap", "^msg_rate = ", "", 80),
    ],
};

/// fi_pingpong with this provider and endpoint type.
macro_rules! fabric {
    ($provider:literal, $kind:literal) => {
        Case::pair(
            concat!("fi_pingpong -p ", $provider, " -e ", $kind, " -c -P {port} {ip}"),
            concat!("fi_pingpong -p ", $provider, " -e ", $kind, " -c -B {port}"),
        )
        .over_tcp()
    };
}

/// libfabric over verbs.
pub const FABRIC: Group = Group {
    program: "fi_pingpong",
    package: "libfabric-bin",
    manner: "",
    devices: "",
    config: "",
    cases: &[
        fabric!("verbs", "msg")
            .both_say(&["^64 10 =10 ", "^4k 10 =10 ", "^1m 10 =10 "])
            .bytes(20 << 20),
        fabric!("verbs;ofi_rxm", "rdm")
            .both_say(&["^64 10 =10 ", "^4k 10 =10 ", "^1m 10 =10 "])
            .bytes(20 << 20),
        fabric!("verbs", "dgram").both_say(&["^64 10 =10 ", "^1k 10 =10 "]).bytes(20 << 10),
    ],
};

/// The utilities of librdmacm, with RC QPs.
pub const ROCE_RDMACM: Group = Group {
    program: "rping",
    package: "rdmacm-utils",
    manner: ", rdma_cm on the RoCE device",
    devices: "rnicd1",
    config: "",
    cases: &[
        Case::pair(
            "rping -c -a {ip} -p {port} -C 10 -v -V",
            "rping -s -a {ip} -p {port} -C 10 -v -V",
        )
        .client_says(&["^ping data: rdma-ping-9: JKLMNOP"])
        .server_says(&["^server ping data: rdma-ping-9: JKLMNOP"])
        .bytes(2 * 10 * 64),
        // Creates its QPs without the ids.
        Case::pair(
            "rping -c -q -a {ip} -p {port} -C 10 -v -V",
            "rping -s -q -a {ip} -p {port} -C 10 -v -V",
        )
        .client_says(&["^ping data: rdma-ping-9: JKLMNOP"])
        .server_says(&["^server ping data: rdma-ping-9: JKLMNOP"])
        .bytes(2 * 10 * 64),
        Case::pair(
            "ucmatose -s {ip} -p {port} -c 4 -C 20",
            "ucmatose -b {ip} -p {port} -c 4 -C 20",
        )
        .both_say(&["^data transfers complete", "^test complete", "^return status 0"])
        .bytes(2 * 4 * 20 * 100),
        Case::pair("cmtime -s {ip} -p {port} -c 10", "cmtime -b {ip} -p {port} -c 10")
            .client_says(&["^connect :", "^disconnect :", "^destroy :"])
            .bytes(0)
            .killed(),
        Case::pair("rdma_client -s {ip} -p {port}", "rdma_server -s {ip} -p {port}")
            .client_says(&["^rdma_client: end 0"])
            .server_says(&["^rdma_server: end 0"])
            .bytes(2 * 16),
    ],
};

/// Benchmarks of every operation, with RC QPs.
pub const ROCE_RDMACM_PERFTEST: Group = Group {
    program: "ib_write_bw",
    package: "perftest",
    manner: ", rdma_cm on the RoCE device",
    devices: "rnicd1",
    config: "",
    cases: &[
        perftest!("send_bw -n 100").both_say(&["^65536 100 "]).bytes(100 << 16),
        perftest!("write_bw -q 4 -n 100").both_say(&["^65536 400 "]).bytes(400 << 16),
        perftest!("read_lat -n 100").client_says(&["^2 100 "]).bytes(100 * 2),
        perftest!("atomic_lat -n 100").client_says(&["^8 100 "]).bytes(100 * 8),
        perftest!("send_bw --use-srq -n 100").both_say(&["^65536 100 "]).bytes(100 << 16),
    ],
};

/// libfabric over verbs, with RC QPs.
pub const ROCE_FABRIC: Group = Group {
    program: "fi_pingpong",
    package: "libfabric-bin",
    manner: ", rdma_cm on the RoCE device",
    devices: "rnicd1",
    config: "",
    cases: &[
        fabric!("verbs", "msg")
            .both_say(&["^64 10 =10 ", "^4k 10 =10 ", "^1m 10 =10 "])
            .bytes(20 << 20),
        fabric!("verbs;ofi_rxm", "rdm")
            .both_say(&["^64 10 =10 ", "^4k 10 =10 ", "^1m 10 =10 "])
            .bytes(20 << 20),
    ],
};

/// A program with UCX, which connects by rdma_cm and wires its RC QPs itself.
pub const ROCE_UCX: Group = Group {
    program: "io_demo",
    package: "ucx-utils",
    manner: ", rdma_cm on the RoCE device",
    devices: "rnicd1",
    config: "",
    cases: &[Case::pair(
        "env UCX_LOG_LEVEL=info UCX_TLS=rc_verbs,ud_verbs:aux,self \
         UCX_SOCKADDR_TLS_PRIORITY=rdmacm io_demo -q -d 64:65536 -i 1000 -t inf -n inf \
         -p {port} {ip}",
        "env UCX_TLS=rc_verbs,ud_verbs:aux,self \
         UCX_SOCKADDR_TLS_PRIORITY=rdmacm io_demo -q -d 64:65536 -p {port}",
    )
    .client_says(&["tag(rc_verbs/rnicd1:1)", "Client exit with status 'OK'"])
    .bytes(1000 * 64)
    .killed()],
};

/// Programs that run until they are killed, and the bytes to move before that.
pub const ENDLESS: &[Case] = &[
    perftest!("write_bw -D 30").bytes(10 << 20),
    perftest!("send_bw -D 30").bytes(10 << 20),
    perftest!("read_bw -D 30").bytes(10 << 20),
];
