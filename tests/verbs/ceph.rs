//! A Ceph cluster whose messengers use RDMA: a monitor at one end, and an OSD and clients at the
//! other.

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::PoisonError;

use rnic_tests::{Process, installed};
use rustix::process::Signal;

use crate::ALONE;
use crate::case::{Group, Setting};
use crate::stage::{CLIENT, SERVER, Stage};

/// Options of the messengers: QPs that Ceph connects itself, and rdma_cm.
pub const MANNERS: [&str; 2] =
    ["ms_async_rdma_cm = false", "ms_async_rdma_cm = true, ms_async_rdma_type = iwarp"];

/// Bytes of the object that is written and read back.
const OBJECT: usize = 8 << 20;

const FSID: &str = "8d1f6c1e-2b0a-4c55-9b8e-3f7f0e3a9d42";

/// Common options. The OSD keeps its objects in memory.
const OPTIONS: &str = "\
ms_type = async+rdma
ms_async_rdma_device_name = rnicd1
ms_async_op_threads = 1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_objectstore = memstore
memstore_device_bytes = 268435456
mon_cluster_log_to_file = false
osd_pool_default_size = 1
osd_pool_default_min_size = 1
mon_allow_pool_size_one = true
mon_data_avail_crit = 1
";

/// The group for [`Stage::new`].
const GROUP: Group = Group {
    program: "ceph-osd",
    package: "ceph-osd",
    manner: "",
    devices: "rnicd1",
    config: "",
    cases: &[],
};

struct Cluster {
    stage: Stage,
}

impl Cluster {
    fn new(setting: Setting) -> Option<Self> {
        if !installed("ceph-mon", "ceph-mon") || !installed("rados", "ceph-common") {
            return None;
        }
        Stage::new(setting, &GROUP).map(|stage| Cluster { stage })
    }

    /// Writes the configuration of an end.
    fn configure(&self, end: usize, manner: &str) {
        let folder = self.stage.folder(end);
        let folder = folder.display();
        let monitor = self.stage.side(SERVER).ip();
        let own = self.stage.side(end).ip();
        let mut text = format!("[global]\n{OPTIONS}{}\n", manner.replace(", ", "\n"));
        writeln!(text, "fsid = {FSID}\nmon_host = [v2:{monitor}:3300/0]").expect("a String");
        writeln!(text, "public_addr = {own}\ncluster_addr = {own}").expect("a String");
        writeln!(text, "mon_data = {folder}/mon\nosd_data = {folder}/osd").expect("a String");
        writeln!(text, "run_dir = {folder}\npid_file =").expect("a String");
        writeln!(text, "admin_socket = {folder}/$name.$pid.asok").expect("a String");
        writeln!(text, "log_file = {folder}/$name.log").expect("a String");
        std::fs::write(self.configuration(end), text).expect("a writable directory");
    }

    fn configuration(&self, end: usize) -> PathBuf {
        self.stage.scratch().join(format!("ceph-{end}.conf"))
    }

    /// Starts a program of Ceph at an end.
    fn start(&self, end: usize, words: &str) -> Process {
        let (program, options) = words.split_once(' ').expect("options");
        let configuration = self.configuration(end);
        self.stage.start(end, &format!("{program} -c {} {options}", configuration.display()))
    }

    /// Runs a program of Ceph at an end, which must succeed.
    fn run(&self, end: usize, words: &str) -> Vec<String> {
        self.start(end, words).succeed()
    }

    /// Starts the monitor and the OSD, and creates a pool.
    fn begin(&self) -> [Process; 2] {
        let server = self.stage.folder(SERVER);
        let ip = self.stage.side(SERVER).ip();
        let map = server.join("map").display().to_string();
        let create = format!("--create --clobber --fsid {FSID} --addv a [v2:{ip}:3300] {map}");
        self.run(SERVER, &format!("monmaptool {create}"));
        self.run(SERVER, &format!("ceph-mon --mkfs -i a --monmap {map}"));
        let monitor = self.start(SERVER, "ceph-mon -i a -f");
        let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid").expect("a UUID");
        let uuid = uuid.trim();
        // Waits for the monitor.
        self.run(CLIENT, &format!("ceph osd new {uuid}"));
        let folder = self.stage.folder(CLIENT).join("osd");
        self.stage.start(CLIENT, &format!("mkdir -p {}", folder.display())).succeed();
        self.run(CLIENT, &format!("ceph-osd -i 0 --mkfs --osd-uuid {uuid}"));
        let osd = self.start(CLIENT, "ceph-osd -i 0 -f");
        self.run(CLIENT, "ceph osd pool create pool 8");
        [osd, monitor]
    }
}

/// A client at each end writes an object, and the client at the other end reads it.
fn objects_are_read_back(setting: Setting) {
    let Some(cluster) = Cluster::new(setting) else { return };
    for manner in MANNERS {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = cluster.stage.read_figures();
        for end in [SERVER, CLIENT] {
            cluster.configure(end, manner);
        }
        let daemons = cluster.begin();
        let written: Vec<u8> = (0..OBJECT).map(|n| ((n * n) >> 7) as u8).collect();
        let source = cluster.stage.scratch().join("written");
        std::fs::write(&source, &written).expect("a writable directory");
        for (from, to) in [(SERVER, CLIENT), (CLIENT, SERVER)] {
            let read = cluster.stage.folder(to).join("read");
            cluster.run(from, &format!("rados -p pool put object-{from} {}", source.display()));
            cluster.run(to, &format!("rados -p pool get object-{from} {}", read.display()));
            assert!(std::fs::read(read).expect("the object") == written, "{manner}");
        }
        // `seq` compares the objects with those of `write`.
        for words in ["write -b 65536 -t 4 --max-objects 64 --no-cleanup", "seq -t 4"] {
            cluster.run(CLIENT, &format!("rados -p pool bench 1 {words}"));
        }
        for mut daemon in daemons {
            daemon.signal(Signal::TERM);
            assert!(daemon.ends_within(rnic_tests::DEADLINE), "{manner}: {:?}", daemon.killed());
        }
        cluster.stage.is_empty();
        drop(alone);
        for folder in ["mon", "osd"] {
            let of = |end| cluster.stage.folder(end).join(folder);
            [SERVER, CLIENT].map(of).iter().for_each(|old| drop(std::fs::remove_dir_all(old)));
        }
        let after = cluster.stage.read_figures();
        if let Err(why) = cluster.stage.went_over(4 * OBJECT as u64, &before, &after) {
            panic!("{manner}: {why}");
        }
    }
}

in_each_setting!(objects_are_read_back);
