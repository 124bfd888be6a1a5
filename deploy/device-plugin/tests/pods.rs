//! Unmodified programs in two pods, on one node and on two.
//!
//! A pod has a root file system, namespaces of its own (mount, pid, net, ipc, uts), and the mounts
//! and variables of `Allocate`. Its program runs as uid 1000 without capabilities. The daemon of a
//! node runs as uid 990 without capabilities, with the configuration of `deploy/rnicd.yaml`, in the
//! node's network namespace.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod common;

use std::io::Write;
use std::os::unix::fs::chown;
use std::process::Command;
use std::time::Instant;

use common::{DEADLINE, Daemon, Kubelet, Process, allocate, built, folder, libraries, plugin};
use rnic_device_plugin::api::ContainerAllocateResponse;
use tempfile::TempDir;

/// User of the daemon in `deploy/rnicd.yaml`.
const DAEMON: u32 = 990;
/// The bytes of 5,000 messages of 64 KiB, the default of `ib_write_bw`.
const BYTES: u64 = 5000 << 16;

/// A network namespace that lasts as long as this value and its processes.
struct Network(Process);

impl Network {
    fn new() -> Self {
        let mut command = Command::new("unshare");
        let script = "ip link set lo up && echo made && exec cat";
        let mut holder = Process::start(command.args(["--net", "sh", "-c", script]));
        holder.line_with("made");
        Network(holder)
    }

    /// Returns the words that run a command here.
    fn enter(&self) -> Vec<String> {
        ["nsenter", "--target", &self.0.id().to_string(), "--net"].map(str::to_owned).into()
    }

    fn run(&self, line: &str) {
        let words = self.enter();
        let mut command = Command::new(&words[0]);
        let output = command.args(&words[1..]).args(line.split(' ')).output().unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Connects a namespace with this address to the bridge of this one.
    fn connect(&self, other: &Network, name: &str, address: &str) {
        let peer = other.0.id();
        self.run(&format!("ip link add {name} type veth peer name eth0 netns {peer}"));
        self.run(&format!("ip link set {name} master bridge up"));
        other.run(&format!("ip addr add {address}/24 dev eth0"));
        other.run("ip link set eth0 up");
    }
}

/// A node with a daemon and a plugin.
struct Node {
    daemon: Daemon,
    libraries: TempDir,
    _program: TempDir,
    _network: Network,
}

impl Node {
    fn new(switch: &Network, number: u8) -> Self {
        let network = Network::new();
        switch.connect(&network, &format!("node{number}"), &format!("10.78.0.{number}"));
        let socket = folder();
        chown(socket.path(), Some(DAEMON), Some(DAEMON)).unwrap();
        let user = format!("--reuid={DAEMON} --regid={DAEMON} --clear-groups");
        let none = "--no-new-privs --inh-caps=-all --bounding-set=-all";
        let mut by = network.enter();
        by.push("setpriv".to_owned());
        by.extend([&*user, none].iter().flat_map(|words| words.split(' ')).map(str::to_owned));
        // The daemon's user may have no access to a checkout.
        let copy = folder();
        let program = copy.path().join("rnicd");
        assert!(Command::new("cp").arg(built("rnicd")).arg(&program).status().unwrap().success());
        let daemon = Daemon::start_by(socket, &program, &config(), &by);
        Node { daemon, libraries: libraries(), _program: copy, _network: network }
    }

    /// Returns the additions to a container.
    async fn allocation(&self) -> ContainerAllocateResponse {
        let mut kubelet = Kubelet::new();
        kubelet.start(None);
        let _process = plugin(&kubelet, &self.daemon.socket, self.libraries.path(), &[]);
        let (_, mut client) = kubelet.plugin().await;
        let reply = allocate(&mut client, &[&["rnicd-0"]]).await.unwrap();
        reply.container_responses.into_iter().next().unwrap()
    }
}

/// Returns the configuration in the manifest, with the device of the node's interface.
fn config() -> String {
    let manifest = include_str!("../../rnicd.yaml");
    let (_, text) = manifest.split_once("  rnicd.toml: |\n").unwrap();
    let lines = text.lines().take_while(|line| line.is_empty() || line.starts_with("    "));
    let lines = lines.map(|line| line.trim().trim_start_matches('#'));
    // The comments are text, and keys that are disabled.
    let is_key = |line: &&str| !line.starts_with(' ') && !line.starts_with("socket");
    lines.filter(is_key).map(|line| format!("{line}\n")).collect()
}

/// A pod on a node.
struct Pod {
    network: Network,
    root: TempDir,
    addition: ContainerAllocateResponse,
}

impl Pod {
    async fn new(switch: &Network, node: &Node, number: u8) -> Self {
        let network = Network::new();
        switch.connect(&network, &format!("pod{number}"), &format!("10.78.0.{number}"));
        Pod { network, root: folder(), addition: node.allocation().await }
    }

    /// Starts a program in a container of the pod.
    fn start(&self, program: &[&str]) -> Process {
        let words = self.network.enter();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command.args(["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]);
        command.args(["sh", "-ec", CONTAINER, "container"]).arg(self.root.path());
        for mount in &self.addition.mounts {
            assert!(mount.read_only);
            command.args([&mount.host_path, &mount.container_path]);
        }
        command.arg("--");
        command.args(self.addition.envs.iter().map(|(name, value)| format!("{name}={value}")));
        Process::start(command.args(program))
    }

    fn run(&self, program: &[&str]) -> (bool, String) {
        let (status, text) = self.start(program).finish();
        (status.success(), text)
    }
}

/// Runs a program in a root file system on top of that of this machine. Arguments: a directory for
/// it, pairs of directories to mount, `--`, variables, program.
const CONTAINER: &str = r#"
    mount --make-rprivate /
    top=$1
    shift
    mount -t tmpfs none "$top"
    mkdir "$top/upper" "$top/work" "$top/root"
    mount -t overlay -o "lowerdir=/,upperdir=$top/upper,workdir=$top/work" none "$top/root"
    cd "$top/root"
    while [ "$1" != -- ]; do
        mkdir -p ".$2"
        mount --bind "$1" ".$2"
        mount -o remount,bind,ro ".$2"
        shift 2
    done
    shift
    mount -t proc none proc
    mount -t tmpfs -o mode=1777 none tmp
    mount -t tmpfs none dev
    mkdir dev/shm dev/old
    for file in null zero urandom; do
        touch "dev/$file"
        mount --bind "/dev/$file" "dev/$file"
    done
    pivot_root . dev/old
    cd /
    umount -l /dev/old
    exec setpriv --reuid=1000 --regid=1000 --clear-groups --no-new-privs --inh-caps=-all \
        --bounding-set=-all env -i "PATH=$PATH" RNIC_LOG=debug "$@"
"#;

/// Returns false, and reports the omission, if this machine cannot make pods.
fn can_run() -> bool {
    let mut probe = Command::new("unshare");
    probe.args(["--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "sh", "-ec"]);
    probe.args(["ip link add x type veth; ip link add y type bridge; mount -t tmpfs none /mnt"]);
    let missing = match probe.output() {
        Ok(output) if output.status.success() => {
            match Command::new("ib_write_bw").arg("--version").output() {
                Ok(_) => return true,
                Err(error) => format!("ib_write_bw (Debian package perftest): {error}"),
            }
        }
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    assert!(std::env::var_os("RNIC_TEST_ALL").is_none(), "RNIC_TEST_ALL is set, but {missing}");
    // The test runner captures the output of `eprintln!` in tests that pass.
    let _ = writeln!(std::io::stderr(), "NOT TESTED: no pods here: {missing}");
    false
}

/// Returns a switch, with the bridge that connects nodes and pods.
fn switch() -> Network {
    let switch = Network::new();
    switch.run("ip link add bridge type bridge");
    switch.run("ip link set bridge up");
    switch
}

/// Runs a server in one pod, and a client in the other until it succeeds. Returns their output.
fn exchange(server: (&Pod, &[&str]), client: (&Pod, &[&str])) -> [String; 2] {
    let mut running = server.0.start(server.1);
    let deadline = Instant::now() + DEADLINE;
    // Its output is buffered until it ends, so only a client can determine whether it listens.
    let text = loop {
        let (succeeded, text) = client.0.run(client.1);
        if succeeded {
            break text;
        }
        assert!(Instant::now() < deadline, "{text}");
        assert!(!running.has_ended(), "{}\n{text}", running.finish().1);
    };
    let (status, served) = running.finish();
    assert!(status.success(), "{served}");
    [served, text]
}

/// Runs `ib_write_bw` in two pods. They exchange QP numbers over the network of the pods.
fn write(server: &Pod, client: &Pod, address: &str) {
    for text in exchange((server, &["ib_write_bw"]), (client, &["ib_write_bw", address])) {
        assert!(text.contains("Device         : rnicd1"), "{text}");
        assert!(
            text.lines().any(|line| line.trim_start().starts_with("65536      5000")),
            "{text}"
        );
    }
}

/// Runs `rping` in two pods. The server is on node 1: the addresses of rdma_cm are those of nodes.
fn ping(server: &Pod, client: &Pod) {
    let words = |side| ["rping", "-v", "-C", "3", "-a", "10.78.0.1", side];
    let [_, text] = exchange((server, &words("-s")), (client, &words("-c")));
    assert_eq!(text.matches("ping data: rdma-ping-").count(), 3, "{text}");
}

#[tokio::test]
async fn pods_of_one_node_use_the_device() {
    if !can_run() {
        return;
    }
    let switch = switch();
    let node = Node::new(&switch, 1);
    let server = Pod::new(&switch, &node, 11).await;
    let client = Pod::new(&switch, &node, 12).await;
    // The container is as unprivileged as it claims.
    let script = "id -u; grep Cap /proc/self/status; ls /proc /run/rnicd /dev/infiniband; \
                  ! touch /run/rnicd/x 2>/dev/null";
    let (succeeded, text) = client.run(&["sh", "-c", script]);
    assert!(succeeded && text.contains("1000\n"), "{text}");
    assert_eq!(text.matches("\t0000000000000000").count(), 5, "{text}");
    let daemon = node.daemon.process.id().to_string();
    assert!(!text.lines().any(|line| line == daemon), "{text}");
    assert!(text.contains("rnicd.sock.tree") && text.contains("uverbs"), "{text}");
    let (succeeded, text) = client.run(&["ibv_devinfo", "-d", "rnicd1"]);
    assert!(succeeded && text.contains("PORT_ACTIVE"), "{text}");
    write(&server, &client, "10.78.0.11");
    has_moved(&node, 2 * BYTES);
    ping(&server, &client);
    let (succeeded, text) = server.run(&["rping", "-s"]);
    assert!(
        !succeeded && text.contains("not allowed by user.host_loopback: bind 0.0.0.0"),
        "{text}"
    );
}

#[tokio::test]
async fn pods_of_two_nodes_use_the_device() {
    if !can_run() {
        return;
    }
    let switch = switch();
    let nodes = [Node::new(&switch, 1), Node::new(&switch, 2)];
    let server = Pod::new(&switch, &nodes[0], 11).await;
    let client = Pod::new(&switch, &nodes[1], 12).await;
    write(&server, &client, "10.78.0.11");
    ping(&server, &client);
    nodes.iter().for_each(|node| has_moved(node, BYTES));
}

/// Waits until the counters of a node's device show these bytes. They follow within a second.
fn has_moved(node: &Node, bytes: u64) {
    let tree = node.daemon.socket.with_file_name("rnicd.sock.tree");
    let counters = tree.join("class/infiniband/rnicd1/ports/1/counters");
    // In units of four bytes, as in the kernel. The daemon may be writing the file.
    let count = |name: &str| -> u64 {
        let text = std::fs::read_to_string(counters.join(name)).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    };
    let deadline = Instant::now() + DEADLINE;
    while (count("port_xmit_data") + count("port_rcv_data")) * 4 < bytes {
        assert!(Instant::now() < deadline, "{} shows less than {bytes}", counters.display());
        std::thread::yield_now();
    }
}
