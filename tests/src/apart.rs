//! Two network namespaces joined by a link that can be cut: two hosts, as far as TCP can tell.

use std::io;
use std::process::Command;

use crate::daemon::{Binaries, Daemon};
use crate::process::Process;

/// One of the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// 10.77.0.1 and fe80::1, on `va`.
    A,
    /// 10.77.0.2 and fe80::2, on `vb`.
    B,
}

impl Side {
    /// Its end of the link.
    pub fn interface(self) -> &'static str {
        match self {
            Side::A => "va",
            Side::B => "vb",
        }
    }

    /// Its IPv4 address on the link.
    pub fn ip(self) -> &'static str {
        match self {
            Side::A => "10.77.0.1",
            Side::B => "10.77.0.2",
        }
    }

    /// Its link-local IPv6 address.
    pub fn link_local(self) -> &'static str {
        match self {
            Side::A => "fe80::1",
            Side::B => "fe80::2",
        }
    }
}

/// The namespaces. They are gone, and the link with them, when this is dropped and what runs in
/// them has ended.
pub struct Apart {
    users: Users,
    a: Process,
    b: Process,
}

/// Which users there are on the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Users {
    /// One, who is root there and here who started the test: in a user namespace.
    One,
    /// Those of this host, for which the test has to be root.
    All,
}

impl Apart {
    /// Makes both; or why that is impossible here. There is one user on them, who is root there.
    ///
    /// # Errors
    ///
    /// What the kernel, or the lack of a program, said.
    pub fn new() -> io::Result<Self> {
        Apart::with(Users::One)
    }

    /// As [`Apart::new`], with all users of this host on them, which only root can do.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn with_all_users() -> io::Result<Self> {
        Apart::with(Users::All)
    }

    fn with(users: Users) -> io::Result<Self> {
        let unshare = || {
            let mut command = Command::new("unshare");
            if users == Users::One {
                command.args(["--user", "--map-root-user"]);
            }
            command.arg("--net");
            command
        };
        // What makes namespaces may be forbidden, which is known only by trying.
        let probe = unshare().args(["ip", "link", "add", "x", "type", "veth"]).output()?;
        if !probe.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&probe.stderr).into_owned()));
        }
        let stay = ["sh", "-c", "ip link set lo up && echo made && exec cat"];
        let mut command = unshare();
        command.args(stay);
        let mut a = Process::start(command);
        a.line_after("made");
        let mut command = inside(&a, users);
        command.args(["unshare", "--net"]).args(stay);
        let mut b = Process::start(command);
        b.line_after("made");
        let apart = Apart { users, a, b };
        let peer = apart.b.id().to_string();
        // Numbers of interfaces that differ, so that nobody can mistake one for the other.
        let link = ["link", "add", "name", "va", "index", "7", "type", "veth"];
        let of_peer = ["peer", "name", "vb", "netns", &peer];
        apart.ip(Side::A, &[&link[..], &of_peer[..]].concat());
        for side in [Side::A, Side::B] {
            let (dev, ip) = (side.interface(), format!("{}/24", side.ip()));
            apart.ip(side, &["addr", "add", &ip, "dev", dev]);
            // The one link-local address that it gets by hand.
            apart.ip(side, &["link", "set", dev, "addrgenmode", "none"]);
            apart.ip(side, &["link", "set", dev, "up"]);
            let ip = format!("{}/64", side.link_local());
            // Nobody else can have it.
            apart.ip(side, &["addr", "add", &ip, "dev", dev, "nodad"]);
        }
        Ok(apart)
    }

    /// A daemon on one of the hosts.
    pub fn daemon(&self, side: Side, binaries: Binaries, config: &str) -> Daemon {
        let wrapper = self.on(side);
        let words: Vec<_> = [wrapper.get_program()]
            .into_iter()
            .chain(wrapper.get_args())
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        // Two hosts reach each other by one port.
        let port = if config.contains("[wired]") { "" } else { "\n[wired]\nport = 4791\n" };
        let on_host = format!("exec {} \"$0\" \"$@\"", words.join(" "));
        Daemon::start_limited(binaries, &format!("{config}{port}"), &on_host)
    }

    /// What runs the program that follows on one of the hosts.
    pub fn on(&self, side: Side) -> Command {
        inside(self.of(side), self.users)
    }

    /// As [`Apart::on`], for what runs on one of the hosts already, and is of their users.
    pub fn from_within(&self, side: Side) -> Command {
        inside(self.of(side), Users::All)
    }

    /// The number of a host's end of the link.
    ///
    /// # Panics
    ///
    /// If `ip` does not tell.
    pub fn index(&self, side: Side) -> u32 {
        let told = self.ip(side, &["-o", "link", "show", side.interface()]);
        told.split(':').next().and_then(|n| n.trim().parse().ok()).expect("a number first")
    }

    /// Takes a host's end of the link down: to the other one it is as if that host were gone.
    pub fn cut(&self, side: Side) {
        self.ip(side, &["link", "set", side.interface(), "down"]);
    }

    fn of(&self, side: Side) -> &Process {
        match side {
            Side::A => &self.a,
            Side::B => &self.b,
        }
    }

    /// Runs `ip` on a host; what it said.
    fn ip(&self, side: Side, args: &[&str]) -> String {
        let output = self.on(side).arg("ip").args(args).output().expect("nsenter");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

/// What runs the program that follows where another process is.
fn inside(process: &Process, users: Users) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--target", &process.id().to_string()]);
    if users == Users::One {
        command.args(["--user", "--preserve-credentials"]);
    }
    command.arg("--net");
    command
}
