//! Programs that others have written for RDMA cards, as Debian builds them, over our
//! libibverbs.so.1 and librdmacm.so.1.
//!
//! An exit code of 0 proves little: a program may have fallen back to something else, or have done
//! nothing. Each must say by itself what it did, the daemons must have placed its bytes, and have
//! nothing left of it afterwards.

mod case;
mod figures;
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

/// Runs the cases of a group one after the other.
fn all(setting: Setting, group: &Group) {
    let Some(mut stage) = Stage::new(setting, group) else { return };
    for case in group.cases {
        // Most of them spin, at both ends: with another pair beside it a message takes as long as
        // the kernel leaves the processor to a spinning one.
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let result = stage.run(case);
        drop(alone);
        // Something of one that failed may be left: no other is run behind it.
        if let Err(why) = result {
            panic!("{setting:?}\n== {}\n{}", case.client, why.replace("\\n", "\n"));
        }
    }
}

/// A test of each setting.
macro_rules! settings {
    ($($name:ident: $group:ident,)*) => {
        $(mod $name {
            use super::*;

            #[test]
            fn between_processes_of_one_daemon() {
                all(Setting::Direct, &case::$group);
            }

            #[test]
            fn between_hosts() {
                all(Setting::Tcp, &case::$group);
            }

            #[test]
            fn between_users() {
                all(Setting::Users, &case::$group);
            }
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
    perftest_wired_by_hand: BY_HAND,
    ucx: UCX,
}

#[test]
fn killed_in_the_middle_of_traffic_nothing_is_left() {
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
