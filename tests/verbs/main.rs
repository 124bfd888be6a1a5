//! Third-party RDMA programs, as Debian builds them, over our libibverbs.so.1 and librdmacm.so.1.
//!
//! An exit code of 0 proves little: a program may have fallen back to another transport, or have
//! done nothing. Each program must print its result, the daemons must have placed its bytes, and
//! they must hold none of its objects afterwards.

/// A test of a function in each setting.
macro_rules! in_each_setting {
    ($test:expr) => {
        #[test]
        fn between_processes_of_one_daemon() {
            ($test)(crate::case::Setting::Direct);
        }

        #[test]
        fn between_hosts() {
            ($test)(crate::case::Setting::Tcp);
        }

        #[test]
        fn between_users() {
            ($test)(crate::case::Setting::Users);
        }
    };
}

mod case;
mod ceph;
mod figures;
mod iscsi;
mod migration;
mod mpi;
mod own_qp;
mod page;
mod pyverbs;
mod stage;
mod wires;

use std::sync::{Mutex, PoisonError};

use case::{Group, Setting};
use stage::Stage;

/// Held while a case runs.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs the cases of a group in order.
fn all(setting: Setting, group: &Group) {
    let Some(mut stage) = Stage::new(setting, group) else { return };
    for case in group.cases {
        // Most programs spin at both ends. Next to a second pair, each message would wait for a
        // time slice of the scheduler.
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let result = stage.run(case);
        drop(alone);
        // A failed case may leave objects behind, so no other case runs after it.
        if let Err(why) = result {
            panic!("{setting:?}\n== {}\n{}", case.client, why.replace("\\n", "\n"));
        }
    }
}

/// Tests of each group in each setting.
macro_rules! settings {
    ($($name:ident: $group:ident,)*) => {
        $(mod $name {
            use super::*;

            in_each_setting!(|setting| all(setting, &case::$group));
        })*
    };
}

settings! {
    devices: DEVICES,
    status: STATUS,
    rdmacm: RDMACM,
    perftest: PERFTEST,
    perftest_with_the_new_post_calls: NEW_POST,
    fio: FIO,
    qperf: QPERF,
    fabric: FABRIC,
    pingpong: PINGPONG,
    perftest_roce: ROCE_PERFTEST,
    ucx: UCX,
    rdmacm_roce: ROCE_RDMACM,
    rdmacm_perftest_roce: ROCE_RDMACM_PERFTEST,
    fabric_roce: ROCE_FABRIC,
    ucx_roce: ROCE_UCX,
}

#[test]
fn programs_killed_under_traffic_leave_nothing() {
    for setting in Setting::ALL {
        let Some(mut stage) = Stage::new(setting, &case::PERFTEST) else { continue };
        for case in case::ENDLESS {
            for first in [0, 1] {
                let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
                stage.kills(case, first);
            }
        }
    }
}
