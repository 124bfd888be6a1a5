//! docs/programs.md: what was run, and what came of it. The tests hold every word of its tables.

use std::fmt::Write;
use std::path::Path;

use crate::case::{End, GROUPS, Group, Setting};
use crate::{mpi, pyverbs, wires};

const INTRODUCTION: &str = "\
# Programs of others

Programs that were written for RDMA cards run on rnicd unchanged, over its libibverbs.so.1 and
librdmacm.so.1. These are run by the tests (`cargo test -p rnic-tests --test verbs`), as Debian 12
builds them:

* *one daemon*: both ends are clients of one daemon and of one user, their QPs connected directly;
* *two hosts*: each end in a network namespace of its own, with a daemon of its own: TCP;
* *two users*: as one daemon, with each end another user, whose library makes the copies.

A program passes if it ends with success, an end that prints a result has printed it (the result row
with the iterations asked for, the data of the ping), the daemons' metrics have gone up by the bytes
asked for, at both ends, and no daemon has anything left of it. What is said to fail here must fail,
or the test does. `{port}` is a port of its own, `{ip}` the server's address.

`ib_send_bw -e` is not run: on an iWARP device its sender sleeps until a completion comes also when
it lacks a credit of the receiver. If it has seen all its completions by then, none comes, though
the credit lies in its memory meanwhile. It hangs like this in one run of six over TCP, in most
without `-Q 1`.

This page is the table of the tests, which says so when it differs; `RNIC_WRITE_DOCS=1` writes it.
";

#[test]
fn the_page_is_what_is_tested() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/programs.md");
    let page = page();
    if std::env::var_os("RNIC_WRITE_DOCS").is_some() {
        std::fs::write(&file, &page).expect("our own sources");
    }
    let there = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(there == page, "docs/programs.md is stale: run this with RNIC_WRITE_DOCS=1");
}

fn page() -> String {
    let mut text = INTRODUCTION.to_owned();
    for group in GROUPS {
        section(&mut text, group).expect("a string takes everything");
    }
    of_wires(&mut text).expect("as above");
    of_mpi(&mut text).expect("as above");
    of_rdma_core(&mut text).expect("as above");
    text + OF_CRATES
}

fn section(text: &mut String, group: &Group) -> std::fmt::Result {
    write!(text, "\n## {}{}", group.package, group.manner)?;
    // Tables of a configuration, which have the same keys.
    let tables: Vec<_> =
        group.config.split('[').skip(1).filter_map(|t| t.split_once('\n')).collect();
    if let [(_, keys), ..] = tables[..] {
        assert!(tables.iter().all(|(_, others)| *others == keys), "{}", group.config);
        let keys: Vec<_> = keys.lines().collect();
        let names: Vec<_> = tables.iter().map(|(name, _)| format!("`[{name}`")).collect();
        write!(text, ", with `{}` in {}", keys.join("` and `"), names.join(" and "))?;
    }
    writeln!(text, "\n")?;
    writeln!(text, "| server | client | one daemon | two hosts | two users |")?;
    writeln!(text, "| --- | --- | --- | --- | --- |")?;
    for case in group.cases {
        let server = match &case.server {
            None => String::new(),
            Some(server) if server.end == End::Killed => format!("`{}`, killed", server.command),
            Some(server) => format!("`{}`", server.command),
        };
        let outcomes = Setting::ALL.map(|_| "pass").join(" | ");
        writeln!(text, "| {server} | `{}` | {outcomes} |", case.client)?;
    }
    Ok(())
}

const OF_WIRES: &str = "\
Not a program of others, but what may go wrong with any that wires its queue pairs by hand: two
processes of plain libibverbs (`tests/verbs/wires.c`), in each setting above, and each way with
either as the end that it is about. What fails does so as on a RoCE adapter: the oldest request,
`timeout` and `retry_cnt` after it was posted, but not within a second (a fifth, if there had been a
stream); the requests behind it and the receives are flushed, the queue pair is in ERR, the other
end's stays in RTS if it was. `RNIC_LOG=debug` has one line on standard error that has the words
below, as `rnicctl why` with the `vendor_err` of the completion does; `{qp}` and `{gid}` are
what this end was told.
";

fn of_wires(text: &mut String) -> std::fmt::Result {
    write!(text, "\n## Wired by hand, and wrong\n\n{OF_WIRES}\n")?;
    writeln!(text, "| what is wrong | how it ends | says, in one daemon | says, on two hosts |")?;
    writeln!(text, "| --- | --- | --- | --- |")?;
    for case in wires::CASES {
        let says = case.says.map(|says| match says {
            "" => String::new(),
            says => format!("`{}`", says.replace(" or ", "` or `")),
        });
        let [one, two] = &says;
        let two = if one == two && !one.is_empty() { "the same" } else { two };
        writeln!(text, "| {} | {} | {one} | {two} |", case.what, case.outcome)?;
    }
    Ok(())
}

const OF_MPI: &str = "\
Two or four ranks (`mpirun --mca pml ucx --mca opal_common_ucx_tls any --mca opal_common_ucx_devices
any`), in the settings above; on two hosts and with two users, as many ranks at one end as at the
other, started there by what stands for ssh. A run passes if it ends with success, what is computed
is right, UCX has said itself that messages went by the transport named, of `rnicd1`, and the
daemons' metrics have gone up at both ends. UCX 1.13 wires its RC queue pairs up by datagrams, so
`rc_verbs` needs `ud_verbs` beside it.
";

fn of_mpi(text: &mut String) -> std::fmt::Result {
    write!(text, "\n## openmpi-bin\n\n{OF_MPI}\n")?;
    writeln!(text, "| program | ranks | `UCX_TLS` | one daemon | two hosts | two users |")?;
    writeln!(text, "| --- | --- | --- | --- | --- | --- |")?;
    for (program, ranks) in mpi::PROGRAMS {
        for (transports, _) in mpi::TRANSPORTS {
            let outcomes = Setting::ALL.map(|_| "pass").join(" | ");
            writeln!(text, "| {program} | {ranks} | `{transports}` | {outcomes} |")?;
        }
    }
    Ok(())
}

const OF_RDMA_CORE: &str = "\
The tests of rdma-core, which are written in Python. One process after the other runs those of a
class on one daemon, whose QPs are connected directly, and again with the `loopback` of `[engine]`
being `tcp`: what comes of them is the same but for one. Those of `test_rdmacm` fork both ends and
have one address for them, so there is no going to two hosts. A test passes if it says `ok` itself;
one that is skipped does not. The address of the device is told to them: they would look for it in
`/sys`.
";

fn of_rdma_core(text: &mut String) -> std::fmt::Result {
    let names = |names: &[&str]| format!("`{}`", names.join("`, `"));
    write!(text, "\n## {}\n\n{OF_RDMA_CORE}\n", pyverbs::PACKAGE)?;
    writeln!(text, "| device | class | tests | |\n| --- | --- | --- | --- |")?;
    for (devices, classes) in pyverbs::RUNS {
        for class in classes {
            let start = format!("| {} | `{}` |", names(devices), class.name);
            if !class.passes.is_empty() {
                writeln!(text, "{start} {} | pass |", names(class.passes))?;
            }
            for fails in class.fails {
                let (tests, outcome) = (names(fails.tests), fails.outcome.word());
                writeln!(text, "{start} {tests} | fails ({outcome}): {} |", fails.why)?;
            }
        }
    }
    let (class, tests, why) = pyverbs::DIRECT_ONLY;
    let over_tcp = "fails over TCP (not run)";
    writeln!(text, "| `rnicd0` | `{class}` | {} | {over_tcp}: {why} |", names(tests))?;
    for (names_of, why) in pyverbs::NOT_RUN {
        writeln!(
            text,
            "| | {} | what is not named above | fails (not run): {why} |",
            names(names_of)
        )?;
    }
    Ok(())
}

/// What `tests/verbs/crates` has shown: building them takes minutes.
const OF_CRATES: &str = "
## crates.io

`tests/verbs/crates` fetches and builds these, and runs them on one daemon, by either path. It takes
some minutes, Debian's cmake, libclang-dev, libibverbs-dev and librdmacm-dev, and is no part of the
tests: what it found is written here by hand.

| crate | what | |
| --- | --- | --- |
| sideway 0.4.3 | `ibv_devinfo` | pass |
| sideway 0.4.3 | `cmtime -c 10`, with and without `-q` (a queue pair of its own) | pass |
| sideway 0.4.3 | `show_gids`, `rc_pingpong`, `rc_pingpong_split`, on `rnicd1` | pass |
| sideway 0.4.3 | its tests (68), on `rnicd1` (`rnic-run --devices rnicd1`: they try every device) | pass, but for one |
| sideway 0.4.3 | `test_query_gid_table_fallback` | fails: it reads network interfaces in `/sys` |
| sideway 0.4.3 | `compiletest` | fails (not run): it compiles programs, and runs none |
| async-rdma 0.5.0 | `devices` | pass |
| async-rdma 0.5.0 | `cm_server` and `cm_client`, on `rnicd0` (it takes the last device) | fails: it asks for the second GID of the port, and iWARP has one; with `.set_gid_index(0)` in the client, pass |
| async-rdma 0.5.0 | `rpc`, `server` and `client`, on `rnicd1` | pass |
| async-rdma 0.5.0 | its tests (52, of which it ignores one), on `rnicd1` | pass, but for one |
| async-rdma 0.5.0 | `context::tests::test1` | fails: it asks `rdma link`, of the kernel, for the name of a device |
";
