//! Generates docs/programs.md, the list of tested programs and their results, and checks it.

use std::fmt::Write;
use std::path::Path;

use crate::case::{End, GROUPS, Group, Setting};
use crate::{ceph, iscsi, migration, mpi, pyverbs, wires};

const INTRODUCTION: &str = "\
# Third-party programs

Programs that were written for RDMA adapters run unchanged on rnicd, over its libibverbs.so.1 and
librdmacm.so.1. The tests (`cargo test -p rnic-tests --test verbs`) run the following programs, as
Debian 12 builds them, in three settings:

* *one daemon*: both ends use one daemon as one user, and their QPs use the direct path;
* *two hosts*: each end has its own network namespace and its own daemon, and uses TCP;
* *two users*: one daemon, but each end runs as a different user, and its library copies the data.

A program passes if it exits with success, each end that has a result prints it (the result row with
the requested iterations, or the data of the ping), the daemons' metrics have grown by the expected
bytes, and no daemon holds objects of the program afterwards. Rows marked as failing must fail,
otherwise the test fails. `{port}` is the port that the test chose, `{ip}` the server's address.

`ib_send_bw -e` is not run. On an iWARP device its sender sleeps until the next completion even if
it only waits for a credit from the receiver. If it has already polled all its completions, it
sleeps forever, although the credit has arrived in its memory. This happens in one of six runs over
TCP, and in most runs without `-Q 1`.

The tests check this page. `RNIC_WRITE_DOCS=1` rewrites it.
";

#[test]
fn programs_page_is_current() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/programs.md");
    let page = page();
    if std::env::var_os("RNIC_WRITE_DOCS").is_some() {
        std::fs::write(&file, &page).expect("writable sources");
    }
    let there = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(there == page, "docs/programs.md is stale: run this with RNIC_WRITE_DOCS=1");
}

fn page() -> String {
    let mut text = INTRODUCTION.to_owned();
    for group in GROUPS {
        section(&mut text, group).expect("writing to a String succeeds");
    }
    of_wires(&mut text).expect("writing to a String succeeds");
    of_mpi(&mut text).expect("writing to a String succeeds");
    of_storage(&mut text).expect("writing to a String succeeds");
    of_rdma_core(&mut text).expect("writing to a String succeeds");
    text + BY_HAND
}

fn section(text: &mut String, group: &Group) -> std::fmt::Result {
    write!(text, "\n## {}{}", group.package, group.manner)?;
    if !group.devices.is_empty() {
        write!(text, " (`RNIC_DEVICES={}`)", group.devices)?;
    }
    // All tables of the configuration must have the same keys.
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
Mistakes that any program can make when it connects RC QPs without a connection manager: two
processes that use only libibverbs (`tests/verbs/wires.c`), in each setting above, and with the
mistake on either end. The failure is that of a RoCE adapter: the oldest request fails when
`retry_cnt` retries have timed out, but no sooner than after 1 s (0.2 s if the QP was connected
before). Later requests and the receives are flushed, the QP moves to ERR, and the peer's QP stays
in RTS if it was in RTS. With `RNIC_LOG=debug`, one line on standard error contains the message
below. `rnicctl why` prints the same message for the `vendor_err` of the completion. `{qp}` and
`{gid}` are the peer's attributes as given to this end.
";

fn of_wires(text: &mut String) -> std::fmt::Result {
    write!(text, "\n## Mistakes when connecting RC QPs\n\n{OF_WIRES}\n")?;
    writeln!(text, "| mistake | outcome | message, one daemon | message, two hosts |")?;
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
any`), in the settings above. On two hosts and with two users, each end runs half of the ranks,
started by a substitute for ssh. A run passes if it exits with success, the results are correct, UCX
reports that messages used the given transport of `rnicd1`, and the daemons' metrics have grown. UCX
1.13 connects its RC QPs over UD, so `rc_verbs` also needs `ud_verbs`.
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

const OF_STORAGE: &str = "\
Programs of several processes, in the settings above, with `RNIC_DEVICES=rnicd1`. Further runs by
hand are in [Storage by hand](#storage-by-hand).

* Ceph (ceph-mon, ceph-osd, ceph-common), `ms_type = async+rdma`: a monitor at one end, an OSD with
  a `memstore` at the other. A client at each end writes an object of 8 MiB, and the client at the
  other end reads it. `rados bench seq` compares the objects with those of `rados bench write`.
* QEMU (qemu-system-x86): live migration (`migrate rdma:{ip}:{port}`) of a guest without an
  operating system (`tests/verbs/guest.s`). In each pass the guest checks a pattern of 16 MiB,
  checks and rewrites another 4 MiB, and prints the number of the pass. The numbers continue at the
  other end without a gap.
* tgt: `tgtd --iser port=3260,pool_sz_mb=64` with a disk of 16 MiB, and the initiators of libiscsi
  (libiscsi-bin) at the other end. With `rnicd0` visible as well, `tgtd` cannot listen: it uses TCP
  port 3260 for iSCSI too, and a listener of the iWARP device needs the TCP port of its number.
";

fn of_storage(text: &mut String) -> std::fmt::Result {
    write!(text, "\n## Storage and virtual machines\n\n{OF_STORAGE}\n")?;
    writeln!(text, "| program | one daemon | two hosts | two users |")?;
    writeln!(text, "| --- | --- | --- | --- |")?;
    let ceph = ceph::MANNERS.map(|manner| format!("Ceph, `{}`", manner.replace(", ", "`, `")));
    let qemu = migration::PIN_ALL.map(|pin_all| format!("QEMU, `rdma-pin-all` {pin_all}"));
    let iscsi = iscsi::INITIATORS.map(|(program, _)| format!("tgt, `{program}`"));
    for program in ceph.into_iter().chain(qemu).chain(iscsi) {
        writeln!(text, "| {program} | {} |", Setting::ALL.map(|_| "pass").join(" | "))?;
    }
    Ok(())
}

const OF_RDMA_CORE: &str = "\
The tests of rdma-core, which are written in Python. Each class runs in its own process on one
daemon, first over the direct path and then with `loopback = \"tcp\"` in `[engine]`. The results are
the same, with one exception. The tests of `test_rdmacm` fork both ends and use one address for
both, so they cannot run on two hosts. A test passes if it reports `ok`; a skipped test does not
pass. The tests get the device's address as an argument, since they would otherwise look for it in
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
                let tests = names(fails.tests);
                let outcome = fails.outcome.word();
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
            "| | {} | all tests not named above | fails (not run): {why} |",
            names(names_of)
        )?;
    }
    Ok(())
}

/// Results of `tests/verbs/crates` and of suites that were run by hand.
const BY_HAND: &str = "
## crates.io

`tests/verbs/crates` downloads and builds these crates, and runs them on one daemon, on either path.
It takes some minutes, needs Debian's cmake, libclang-dev, libibverbs-dev and librdmacm-dev, and is
not part of the tests: the results below were entered by hand.

| crate | program or tests | |
| --- | --- | --- |
| sideway 0.4.3 | `ibv_devinfo` | pass |
| sideway 0.4.3 | `cmtime -c 10`, with and without `-q` (its own QP) | pass |
| sideway 0.4.3 | `show_gids`, `rc_pingpong`, `rc_pingpong_split`, on `rxe_0` | pass |
| sideway 0.4.3 | its tests (68), on `rxe_0` (`rnic-run --devices rxe_0`: they use every device) | pass |
| sideway 0.4.3 | `compiletest` | fails (not run): it only compiles programs |
| async-rdma 0.5.0 | `devices` | pass |
| async-rdma 0.5.0 | `cm_server` and `cm_client`, on `rnicd0` (it takes the last device) | fails: it requests the second GID of the port, but iWARP has only one; with `.set_gid_index(0)` in the client, pass |
| async-rdma 0.5.0 | `rpc`, `server` and `client`, on `rxe_0` | pass |
| ibverbs 0.9.2 | `loopback`, its tests | pass |
| ruapc 0.2.0-alpha.7 | its tests with all features and `RUAPC_PREFER_RXE=1` | pass. `concurrent_large_calls_and_inline_traffic_share_a_small_send_window` over TCP: 60 of 60 runs on an idle host; beside a compiler it failed in the 8th (`IBV_WC_RNR_RETRY_EXC_ERR`: its `rnr_retry` of 6 and timer of 10 us allow a receive to be 6 ms late, on an adapter 60 us) |
| async-rdma 0.5.0 | its tests (52, one of them ignored), on `rxe_0` | pass |

## Python wheels

Entered by hand: the wheels come from PyPI, and are not part of the tests.

| wheel | its libibverbs | test | |
| --- | --- | --- | --- |
| nixl-cu12 1.5.1 | `libibverbs-1de1263b.so.1.14.48.0`, beside UCX and libmlx5 | two agents, a write of host memory by UCX (`UCX_TLS=rc,ud`) on `rnicd1` | pass; without `rnic-run` there is no device |
| mooncake-transfer-engine 0.3.13 | none: it needs the system's `libibverbs.so.1` | two engines with `rdma`, a write of host memory on `rnicd1`, with a stub for the driver of graphics cards | pass |

## Storage by hand

Larger set-ups of the programs in [Storage and virtual machines](#storage-and-virtual-machines), and
DiSNI and fabtests. Run by hand on 2026-11-27 on `rnicd1`, with a debug build, as a plain user. *One
daemon*: all processes use one daemon. *Two hosts*: two network namespaces with a daemon each.
Debian 12 has the programs unless stated otherwise.

| program | test | one daemon | two hosts |
| --- | --- | --- | --- |
| Ceph 16.2.15, `ms_type = async+rdma`, `ms_async_rdma_cm = false` | a monitor, a manager and two OSDs (the second OSD and the client on the second host; `memstore` with one daemon, `bluestore` on two hosts), `rados bench` write, `seq` and `rand`, `rados put` and `get` of 20 MB with equal hashes | pass | pass |
| the same, `ms_async_rdma_cm = true` and `ms_async_rdma_type = iwarp` (rdma_cm) | the same | pass | pass |
| the same, either mode | OSD killed during `rados bench` and started again: the monitor notices, an object written before is read back unchanged (`mon_osd_min_down_reporters = 1`, `memstore`) | not run | pass. With rdma_cm, the remaining OSD was full before the bench of 45 s ended; one of 20 s ended in order |
| the same, `ms_async_rdma_cm = true` with `ms_async_rdma_type = ib` | `ceph -s` | fails: without `iwarp`, Ceph registers a descriptor of -1 and aborts | not run |
| QEMU 7.2.22, TCG, `migrate rdma:...`, with and without `rdma-pin-all` | a guest that fills 16 MiB with a pattern, writes to 4 MiB all the time and checks the pattern: memory right, the guest runs on (64 MiB; also 512 MiB with `rdma-pin-all` on two hosts) | pass | pass |
| the same, 64 MiB, limited to 20 MB/s | the destination is killed: the migration fails, the source runs on | pass, without `rdma-pin-all` | pass |
| the same, without `rdma-pin-all` | `migrate_cancel`: the source runs on; a port without a listener: refused | not run | pass |
| the same | `postcopy-ram` | fails: the kernel refuses `userfaultfd` to plain users | fails: the same |
| tgt 1.0.85 (`tgtd --iser port=3260,pool_sz_mb=128`, iSCSI on TCP port 3260 too) with `iscsi-inq`, `iscsi-readcapacity16` and `iscsi-perf` of libiscsi 1.19.0 | inquiry, capacity and reads by `iser://` URLs. tgt 1.0.85 accepts an initiator only if both its address (`-I`) and its name (`-Q`) are bound | pass | pass |
| the same with `iscsi-dd` of libiscsi's source, commit 65ebd14 | 128 MiB from one LUN to another, files compared. Changed: it must call `iscsi_service` only for a descriptor with events. With `-6`, all bytes; without, it omits the last block | pass | pass; the last block was not compared |
| the same with `iscsi-test-cu`, each test on its own, `MALLOC_PERTURB_=255` | 230 tests: 194 passed. On two hosts, 42 of them: 38 passed | 36 fail. 12 of them fail over TCP too. 16 crash (five examined: within libiscsi), and so does the second connection of a process unless new memory is zero. The others: residuals, reservations after a logout, and sequence numbers over iSER; causes were not examined further | 4 fail |
| the same with `iscsi-ls` | | fails: it does not accept `iser://` | the same |
| DiSNI, commit 92b5233, built with `javac` and Debian's jars, OpenJDK 17 | `VerbsServer`, `SendRecvServer` and their clients | pass | pass |
| the same | `ReadServer`, `ReadClient` | 10 of 10 runs (2026-11-28) | 7 of 7 runs, and again on 2026-11-28 |
| the same | benchmark `ReadServer`, `ReadClient`, `-s 4096 -k 2000` | pass | pass |
| the same | benchmark `SendRecvServer`, `SendRecvClient`, `-s 4096 -k 2000` | the client passes. The server never ends: it waits for receives that no message takes | the same (2026-11-28) |
| fabtests of libfabric 1.17.0's source with Debian's libfabric 1.17.0, `-p verbs` | `fi_msg_pingpong -v`, `fi_msg_bw -v`, `fi_rma_bw -e msg` with `write`, `read` and `writedata`, `fi_msg_epoll`, `fi_cm_data`, `fi_bw -e msg` | pass, and `fi_msg_sockets` | pass |
| the same, `-p \"verbs;ofi_rxm\"` | `fi_rdm_pingpong -v`, `fi_rdm_tagged_pingpong -v`, `fi_rdm_tagged_bw -v`, `fi_rma_bw -e rdm` with `write` and `read`, `fi_rdm_atomic -o all`, `fi_rdm_multi_client`; on two hosts also `fi_multi_recv` | pass | pass |
| the same | `fi_shared_ctx -e msg` (verbs), `fi_rdm_shared_av` (rxm) | fails: `fi_getinfo` finds no provider with these capabilities; not examined further | the same |

## Suites of other projects

Projects whose CI runs on the kernel's rxe, run by hand on 2026-11-27 (perftest, valkey, dapl2-utils
and infiniband-diags) or 2026-11-28, over the direct path and over TCP unless stated otherwise. The
sources are unchanged. The configuration has the default addresses and `devices = { rxe_0 = \"*\" }`
in `[wired]`, and the suite sees only this device: `rnic-run --devices rxe_0 COMMAND`. The commands
are those of the CI.

| suite | command | passed | failed or skipped, and why |
| --- | --- | --- | --- |
| rust-rdma-io, commit f7331ca | `cargo test --workspace`, one thread | 202 | skipped: 3, which need a malicious peer or an adapter that forges keys (they skip themselves on rxe too); 1 is ignored by the suite. `read_ring_ooo_repost_no_overwrite` assumes that one of 41 posted Writes completes before the next poll: it fails in most runs with a debug build of the daemon on a shared CPU, and passes in 8 of 8 if the daemon has a real-time priority |
| rust-ibverbs 0.9.2, commit 2958654 | `cargo test --test loopback -- --ignored`, without the `--skip`s of its CI for rxe | 33 | without the profile `rxe`, `roce_route_failure_diagnostic` would fail if GID 1 is an IPv6 address: RTR succeeds although no neighbour has the GID of the peer ([limits.md](limits.md)) |
| rust-ibverbs 0.9.2, commit 2958654 | `cargo test --features rdmacm --test rdmacm -- --ignored` | 3 | |
| ruapc 0.2.0-alpha.4, commit 101728d | `RUAPC_PREFER_RXE=1 cargo test --all-features` | 405 | `trybuild`, which only compiles programs, and 22 examples in comments pass too |
| sideway, commit 9b7dcb4 | `cargo test`, `show_gids`, `ibv_devinfo`, `rc_pingpong`, `rc_pingpong_split`, `cmtime` | 69 tests, 5 programs | |
| valkey, commit 55bbbe0 | `runtest-rdma`, without `--install-rxe` (`make BUILD_RDMA=module`) | all | |
| async-rdma, commit 9480131 | `cargo test --features \"cm raw\"` | 51 tests, 44 of 45 examples in comments | ignored by the suite: 1. The example of `get_last_ibv_event_type` overruns a CQ of one entry and expects `IBV_EVENT_CQ_ERR` as the last event. A CQ has at least 16 entries; with `--as rxe` it has one, but `IBV_EVENT_QP_FATAL` follows |
| rpma, commit f52c00d | `examples/run-all-examples.sh` | 17 of 17 | `09scch-flush-to-persistent-GPSPM` over TCP, which expects the completion of its Send before the answer of the peer: 12 of 12 runs |
| dapl2-utils 2.1.10, direct path | `dtest -b 4096`, providers `ofa-v2-cma` and `ofa-v2-scm` | 2 | `ofa-v2-ucm`: the client needs the QP number and LID of the server, which Ethernet does not have |
| perftest 4.5, direct path | 25 further modes: `-x 0`, `-R`, `-R -e`, `-b -t 16 -Q 8`, UC, UD | 25 | |
| infiniband-diags 44.0 | `ibstat`, `ibstatus` | 2 | `perfquery`, `ibaddr`, `sminfo`: they need `/dev/infiniband/umad0`, which RoCE devices without a subnet manager do not use |

## Tutorials and benchmarks

Run by hand on 2026-11-28 as above, over the direct path and over TCP. The configuration is that of
the previous section, in a network namespace of its own.

| project | programs | |
| --- | --- | --- |
| rdma-core 65 (commit 691953d) | `ibv_rc_pingpong`, also with `-N`, `ibv_uc_pingpong`, `ibv_ud_pingpong`, `ibv_srq_pingpong`, `rping`, `ucmatose`, also with `-f gid`, `udaddy`, `rdma_server`, `rdma_xserver -c r` and their clients | pass; `ibv_rc_pingpong` needs `ibv_alloc_buf` |
| the same | its tests (pyverbs), `run_tests.py --dev rxe_0` | 118 pass. The other 271 skip themselves: they test mlx5 and EFA devices, or features that the device lacks |
| the same | `mckey`, `ibv_xsrq_pingpong`, `rstream`, `udpong`, `ibv_rc_pingpong` with `-t`, `-o` and `-j` | fails: no multicast, XRC, rsockets, time stamps, on-demand paging or device memory |
| perftest, commit 00b55b6 | 38 modes of the seven programs: RC, UC, UD, `-R`, `-e`, `-b`, `-l 8`, `--use-srq`, `--write_with_imm`, `--recv_post_list=8`, `-D 2` | pass |
| the same | `ib_send_bw -c XRC`, `ib_write_bw --no_lock` | fails: no XRC and no thread domains, as on the kernel's rxe |
| eRPC, commit de83dab | `latency` with `-DTRANSPORT=infiniband -DROCE=ON` (UD, inline, unsignaled; eRPC flushes its send queue by a Send to QP 0) | pass |
| animeshtrivedi/rdma-example, commit 615b85d | `rdma_server`, `rdma_client` | pass |
| tarickb/the-geek-in-the-corner, commit fb2358c | `01_basic-client-server`, `02_read-write` with `read` and `write`, `03_file-transfer` (3 MB, files equal) | pass |
| w180112/RDMA-example, commit 8184a02 | `server`, `client` | 6 of 7 runs. The server posts its receive after the connection is established, and the client connects with `rnr_retry_count` 0: a request that arrives before the receive fails (`IBV_WC_RNR_RETRY_EXC_ERR`), on an adapter too |
| claudebarthels/infinity, commit c6cbbbf; jcxue/RDMA-Tutorial, commit be4d713 | | fails (not run): they name the peer by its LID and set no `is_global`, so they need InfiniBand |
";
