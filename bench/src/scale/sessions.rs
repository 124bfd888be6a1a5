//! Cost of a Write with idle clients, and memory per client.

use rnic_client::{Access, Context, Cq, Mr, Pd, Qp, QpOptions};
use rnic_tools::perf::PerfError;
use rnic_tools::perf::peer::open;
use rnic_tools::perf::report::Figure;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::costs::{Case, costs};
use super::qps::work;
use super::row::{FLAT, row, up_to};
use crate::daemon::Setup;
use crate::footprint::MemoryUse;
use crate::report::{Kind, Outcome, Row};
use crate::site::{Options, Site};

/// Measures with 0, 100 and the maximum number of idle sessions. They belong to the driver's
/// daemon, which has one worker: with two, a thousand sessions need more descriptors than the usual
/// limit.
pub fn measure(options: &Options<'_>, qps: u32, setup: Setup) -> Result<Vec<Row>, PerfError> {
    let most = (qps / 10).max(1);
    let setup = Setup { workers: Some(1), ..setup };
    raise_nofile_limit()?;
    let mut cases = Vec::new();
    let mut idle = Vec::new();
    let mut memory = MemoryUse::default();
    for sessions in up_to(most, &[0, 100]).into_iter().rev() {
        let setup = Setup { sessions: sessions + 16, ..setup };
        let site = Site::start(options.rnicd, setup)?;
        let (clients, taken) = clients(&site, sessions)?;
        if sessions == most {
            memory = taken;
        }
        idle.push(clients);
        cases.push(Case { what: format!("{sessions} idle sessions"), site, spec: work() });
    }
    let (measured, ()) = costs(cases, options, |_| Ok(()))?;
    let path = &measured.path;
    let spec = &measured.cases[0].spec;
    let subject =
        format!("cost per RDMA Write of 8 B, one pair of QPs beside {most} idle sessions");
    let mut rows = vec![row(subject, Kind::Cost, path, setup, spec, measured.figures, Some(FLAT))];
    if setup.daemons == 1 {
        let per_session = |bytes: u64| bytes as f64 / f64::from(most) / 1024.0;
        let anonymous = per_session(memory.anonymous);
        let figures = vec![
            Figure::single("anonymous", "KiB", anonymous),
            Figure::single("rings", "KiB", per_session(memory.arenas)),
        ];
        let subject = format!("daemon's memory per session without objects, {most} sessions");
        let mut taken = row(subject, Kind::Daemon, path, setup, spec, figures, None);
        taken.outcomes = vec![Outcome::new("rings", anonymous, "KiB", None)];
        rows.push(taken);
    }
    Ok(rows)
}

/// An idle client.
struct Client {
    _queues: Option<(Qp, Cq)>,
    _region: Mr,
    _pd: Pd,
    _context: Context,
}

/// Creates `count` clients. Returns them, and the memory that their sessions alone use.
fn clients(site: &Site, count: u32) -> Result<(Vec<Client>, MemoryUse), PerfError> {
    let watch = open(site.socket())?;
    let before = MemoryUse::of(&watch)?;
    let sessions =
        (0..count).map(|_| Ok(open(site.socket())?)).collect::<Result<Vec<_>, PerfError>>()?;
    let after = MemoryUse::of(&watch)?;
    let client = |(n, context): (usize, Context)| {
        let pd = context.open_pd(None)?;
        let region = pd.reg_mr(&context.create_shared_buffer(4096)?, .., Access::LOCAL_WRITE)?;
        let queues = match n % CLIENTS_PER_QP {
            0 => {
                let cq = context.create_cq(16, None)?;
                Some((pd.create_qp(&QpOptions::new(&cq))?, cq))
            }
            _ => None,
        };
        Ok(Client { _queues: queues, _region: region, _pd: pd, _context: context })
    };
    let taken = MemoryUse {
        anonymous: after.anonymous.saturating_sub(before.anonymous),
        arenas: after.arenas.saturating_sub(before.arenas),
    };
    Ok((sessions.into_iter().enumerate().map(client).collect::<Result<_, PerfError>>()?, taken))
}

/// Raises the limit on file descriptors: each session needs several here and in the daemons, which
/// inherit the limit.
fn raise_nofile_limit() -> Result<(), PerfError> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .map_err(|e| PerfError::io("raising RLIMIT_NOFILE")(e.into()))
}

/// Number of clients per client with a CQ and a QP. The others have only a region, because a CQ
/// needs a descriptor.
const CLIENTS_PER_QP: usize = 4;
