//! Precedence of rules, and clients that no rule matches.

use super::*;
use crate::config::Kind;

fn policy(text: &str) -> Policy {
    policy_of(text, 0)
}

/// Returns the rules of a daemon that runs as this user.
fn policy_of(text: &str, own_user: u32) -> Policy {
    let config = Config::parse(std::path::Path::new("t"), text).unwrap_or_else(|e| panic!("{e}"));
    Policy::for_system(&config, Overflow { uid: 65_534, gid: 65_534 }, own_user)
}

fn who(uid: u32, gids: &[u32]) -> Identity {
    Identity { uid, gids: gids.to_vec(), foreign: false }
}

fn said<T: std::fmt::Debug>(result: Result<T, Refusal>) -> String {
    result.map_or_else(|refusal| refusal.to_string(), |ok| panic!("{ok:?}"))
}

const RULES: &str = "[limits.session]\nqps = 9\npds = 9\nmrs = 9\n\
    [[user]]\nwho = 1000\nsession = { qps = 1 }\ntrusted = true\n\
    [[group]]\nwho = 50\nsession = { qps = 2, pds = 2 }\nuser = { sessions = 3, startups = 4 }\n\
    [[group]]\nwho = 60\nsession = { mrs = 3, diagnoses = 5 }\ntrusted = true\n\
    [[user]]\nwho = 65534\nsession = { qps = 7 }\ntrusted = true\n\
    [[group]]\nwho = 65534\nsession = { qps = 7 }\n";

#[test]
fn user_rule_precedes_group_and_default() {
    let policy = policy(RULES);
    let of = |identity: &Identity, kind| {
        let rights = policy.rights(identity);
        (rights.session_limit(kind), rights.session_key(kind))
    };
    let alice = who(1000, &[1000, 60, 50]);
    assert_eq!(of(&alice, Kind::Qps), (1, "user.1000.session.qps".to_owned()));
    // The first of two matching groups in the file applies.
    assert_eq!(of(&alice, Kind::Pds), (2, "group.50.session.pds".to_owned()));
    assert_eq!(of(&alice, Kind::Mrs), (9, "limits.session.mrs".to_owned()));
    let rights = policy.rights(&alice);
    assert!(rights.trusted && !rights.admin);
    assert_eq!(rights.user_limit(Kind::Sessions), 3);
    assert_eq!(rights.user_key(Kind::Sessions), "group.50.user.sessions (user 1000)");
    assert_eq!(rights.user_key(Kind::Qps), "limits.user.qps (user 1000)");
    assert_eq!(rights.user_count(Kind::Startups), 4);
    assert_eq!(rights.session_count(Kind::Diagnoses), 256);
    let bob = policy.rights(&who(1001, &[60]));
    assert_eq!((bob.session_limit(Kind::Mrs), bob.session_limit(Kind::Diagnoses)), (3, 5));
    assert!(bob.trusted);
    let carol = policy.rights(&who(1002, &[]));
    assert_eq!((carol.session_limit(Kind::Qps), carol.trusted), (9, false));
}

#[test]
fn overflow_user_matches_no_rule() {
    let rules = format!(
        "[control]\nadmins = [65534, \"@65534\"]\n{RULES}[[pd]]\nname = \"p\"\nusers = [65534]\n\
         [[listen]]\nwho = \"*\"\naddress = \"*\"\n"
    );
    let policy = policy(&rules);
    let nobody = who(65_534, &[65_534, 50]);
    let rights = policy.rights(&nobody);
    assert_eq!(rights.session_limit(Kind::Qps), 9);
    assert!(!rights.trusted && !rights.admin);
    // A known user with an unknown group.
    assert_eq!(policy.rights(&who(7, &[65_534])).session_limit(Kind::Qps), 9);
    assert!(policy.named_pd(&nobody, "p").is_err());
    assert!(policy.may_listen(&nobody, ([127, 0, 0, 1], 7).into()).is_err());
}

/// If the daemon runs as the overflow user, its own user's programs look like those of unmapped
/// users.
#[test]
fn overflow_user_is_not_the_own_user() {
    let nobody = who(65_534, &[65_534]);
    let rights = policy_of(RULES, 65_534).rights(&nobody);
    assert!(!rights.own && !rights.known && !rights.admin && !rights.trusted);
    assert!(policy_of(RULES, 65_534).own_user_is_unknown());
    let rights = policy_of(RULES, 1001).rights(&who(1001, &[]));
    assert!(rights.own && rights.known && rights.admin);
    assert!(!policy_of(RULES, 1001).own_user_is_unknown());
}

#[test]
fn root_and_configured_users_are_admins() {
    let policy = policy("[control]\nadmins = [\"@50\", 7]\n");
    let admin = |uid, gids: &[u32]| policy.rights(&who(uid, gids)).admin;
    assert!(admin(0, &[0]) && admin(7, &[1]) && admin(1000, &[3, 50]));
    assert!(!admin(1000, &[3]));
}

#[test]
fn listen_rules_allow_only_their_addresses() {
    let free = policy("");
    assert_eq!(free.may_listen(&who(5, &[]), ([0, 0, 0, 0], 80).into()), Ok(()));
    let policy = policy(
        "[[listen]]\nwho = 5\naddress = \"127.0.0.0/8\"\nports = \"1024-2000\"\n\
         [[listen]]\nwho = \"@50\"\naddress = \"*\"\nports = 9\n",
    );
    let ok = |uid, gids: &[u32], address: &str| {
        let address = address.parse().unwrap_or_else(|e| panic!("{address}: {e}"));
        policy.may_listen(&who(uid, gids), address).is_ok()
    };
    assert!(ok(5, &[], "127.0.0.1:1024") && ok(5, &[], "127.9.0.1:0"));
    assert!(ok(5, &[], "[::ffff:127.0.0.1]:2000"));
    assert!(
        !ok(5, &[], "127.0.0.1:80") && !ok(5, &[], "0.0.0.0:1024") && !ok(5, &[], "10.0.0.1:0")
    );
    assert!(ok(6, &[50], "[::]:9") && !ok(6, &[50], "[::]:10") && !ok(6, &[], "[::]:9"));
    assert_eq!(
        said(policy.may_listen(&who(6, &[]), ([127, 0, 0, 1], 80).into())),
        "not allowed by listen: bind 127.0.0.1:80 as user 6"
    );
}

#[test]
fn connect_rules_allow_only_their_addresses() {
    let policy = policy("[[connect]]\nwho = \"*\"\nnetwork = \"10.0.0.0/8\"\nports = 7\n");
    assert_eq!(policy.may_connect(&who(5, &[]), ([10, 1, 2, 3], 7).into()), Ok(()));
    for address in ["10.1.2.3:8", "11.0.0.1:7", "[::1]:7"] {
        let address: SocketAddr = address.parse().unwrap_or_else(|e| panic!("{e}"));
        let text = said(policy.may_connect(&who(5, &[]), address));
        assert_eq!(text, format!("not allowed by connect: connect to {address} as user 5"));
    }
}

#[test]
fn foreign_clients_cannot_reach_host_addresses() {
    let policy = policy(
        "[[user]]\nwho = 5\nhost_loopback = true\n[[user]]\nwho = 6\nhost_loopback = false\n\
         [[group]]\nwho = 50\nhost_loopback = true\n[[user]]\nwho = 65534\nhost_loopback = true\n",
    );
    let foreign = |uid, gids: &[u32]| Identity { foreign: true, ..who(uid, gids) };
    let reaches = |who: &Identity, address: &str| {
        let address = address.parse().unwrap_or_else(|e| panic!("{address}: {e}"));
        policy.may_reach(who, "connect to", address).is_ok()
    };
    for here in [
        "127.0.0.1:1",
        "127.255.255.254:1",
        "0.0.0.0:1",
        "169.254.169.254:80",
        "[::1]:1",
        "[::]:1",
        "[fe80::1%3]:1",
        "[febf::1]:1",
        "[::ffff:127.0.0.1]:1",
        "[::ffff:169.254.0.1]:1",
        "[::ffff:0.0.0.0]:1",
    ] {
        // Not even root: a container's root may have uid 0 here.
        assert!(!reaches(&foreign(0, &[0]), here) && !reaches(&foreign(7, &[]), here), "{here}");
        assert!(reaches(&who(7, &[]), here), "{here}: of this namespace");
        assert!(reaches(&foreign(5, &[]), here) && reaches(&foreign(7, &[50]), here), "{here}");
        assert!(!reaches(&foreign(6, &[50]), here), "{here}: the user's rule comes first");
        assert!(!reaches(&foreign(65_534, &[50]), here), "{here}: no rule for the overflow user");
    }
    for elsewhere in
        ["10.0.0.1:1", "128.0.0.1:1", "169.255.0.1:1", "[fec0::1]:1", "[2001:db8::1]:1"]
    {
        assert!(reaches(&foreign(7, &[]), elsewhere), "{elsewhere}");
    }
    assert_eq!(
        said(policy.may_reach(&foreign(7, &[]), "bind", ([0, 0, 0, 0], 80).into())),
        "not allowed by user.host_loopback: bind 0.0.0.0:80 from another network namespace as user 7"
    );
}

#[test]
fn passing_sockets_is_a_separate_right() {
    let policy = policy(
        "[[user]]\nwho = 5\nsockets = true\n[[user]]\nwho = 6\ntrusted = true\n\
         [[group]]\nwho = 50\nsockets = true\n",
    );
    let of = |uid, gids: &[u32]| {
        let rights = policy.rights(&who(uid, gids));
        (rights.sockets, rights.trusted)
    };
    assert_eq!((of(5, &[]), of(6, &[])), ((true, false), (false, true)));
    assert_eq!((of(6, &[50]), of(7, &[])), ((true, true), (false, false)));
}

#[test]
fn named_domains_open_to_their_users_and_groups() {
    let policy = policy("[[pd]]\nname = \"shared\"\nusers = [5]\ngroups = [50]\nmrs = 4\n");
    assert!(policy.named_pd(&who(5, &[]), "shared").is_ok_and(|pd| pd.mrs == Some(4)));
    assert!(policy.named_pd(&who(6, &[50]), "shared").is_ok());
    // Not even root, unless a rule names it.
    assert_eq!(
        said(policy.named_pd(&who(0, &[0]), "shared")),
        "not allowed by pd.shared: open protection domain \"shared\" as user 0"
    );
    assert!(said(policy.named_pd(&who(5, &[]), "other")).contains("no [[pd]] named \"other\""));
}

#[test]
fn unknown_names_are_reported() {
    let policy = policy(
        "[control]\nadmins = [\"no-such-user\"]\n[[user]]\nwho = \"root\"\n[[user]]\nwho = 0\n\
         [[group]]\nwho = \"no-such-group\"\n",
    );
    let text = policy.unknown().join("; ");
    assert!(text.contains("control.admins: user no-such-user does not exist"), "{text}");
    assert!(text.contains("[[user]] 0: user ID 0 already has a rule"), "{text}");
    assert!(text.contains("[[group]]: group no-such-group does not exist"), "{text}");
}
