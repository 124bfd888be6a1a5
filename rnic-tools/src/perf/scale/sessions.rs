//! What a Write costs beside clients that have nothing to do, and what a client takes.

use rnic_client::{Access, Context, Cq, Mr, Pd, Qp, QpOptions};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::super::daemon::Setup;
use super::super::error::PerfError;
use super::super::footprint::UseOfMemory;
use super::super::peer::open;
use super::super::report::{Figure, Measure, Outcome, Row};
use super::super::site::Site;
use super::qps::work;
use super::{Case, FLAT, Place, ScaleOptions, costs, row, up_to};

/// Beside none, a hundred and the most. Their sessions are with the driver's daemon, which has one
/// worker: with two, a thousand sessions need more descriptors than are common.
pub fn measure(options: &ScaleOptions<'_>, place: Place) -> Result<Vec<Row>, PerfError> {
    let most = (options.qps / 10).max(1);
    let place = Place { setup: Setup { workers: Some(1), ..place.setup }, ..place };
    all_descriptors()?;
    let (mut cases, mut idle, mut memory) = (Vec::new(), Vec::new(), UseOfMemory::default());
    for sessions in up_to(most, &[0, 100]).into_iter().rev() {
        let setup = Setup { sessions: sessions + 16, ..place.setup };
        let site = Site::start(options.rnicd, setup, place.daemons)?;
        let (clients, taken) = clients(&site, sessions)?;
        if sessions == most {
            memory = taken;
        }
        idle.push(clients);
        cases.push(Case { what: format!("{sessions} idle sessions"), site, spec: work() });
    }
    let measured = costs(&cases, options.amount, options.rounds)?;
    let of = (measured.path.as_str(), place);
    let spec = &cases[0].spec;
    let subject =
        format!("cost per RDMA Write of 8 B, one pair of QPs beside {most} idle sessions");
    let mut rows = vec![row(subject, Measure::Cost, of, spec, measured.figures, Some(FLAT))];
    if place.daemons == 1 {
        let per_session = |bytes: u64| bytes as f64 / f64::from(most) / 1024.0;
        let anonymous = per_session(memory.anonymous);
        let figures = vec![
            Figure::single("anonymous", "KiB", anonymous),
            Figure::single("rings", "KiB", per_session(memory.arenas)),
        ];
        let subject = format!("daemon's memory per session without objects, {most} sessions");
        let mut taken = row(subject, Measure::Daemon, of, spec, figures, None);
        taken.outcomes = vec![Outcome::new("rings", anonymous, "KiB", None)];
        rows.push(taken);
    }
    Ok(rows)
}

/// A client that has nothing to do.
struct Client {
    _queues: Option<(Qp, Cq)>,
    _region: Mr,
    _pd: Pd,
    _context: Context,
}

/// So many clients, and what their sessions alone took.
fn clients(site: &Site, count: u32) -> Result<(Vec<Client>, UseOfMemory), PerfError> {
    let watch = open(site.socket())?;
    let before = UseOfMemory::of(&watch)?;
    let sessions =
        (0..count).map(|_| Ok(open(site.socket())?)).collect::<Result<Vec<_>, PerfError>>()?;
    let after = UseOfMemory::of(&watch)?;
    let client = |(n, context): (usize, Context)| {
        let pd = context.open_pd(None)?;
        let region = pd.reg_mr(&context.create_shared_buffer(4096)?, .., Access::LOCAL_WRITE)?;
        let queues = match n % QUEUES_EVERY {
            0 => {
                let cq = context.create_cq(16, None)?;
                Some((pd.create_qp(&QpOptions::new(&cq))?, cq))
            }
            _ => None,
        };
        Ok(Client { _queues: queues, _region: region, _pd: pd, _context: context })
    };
    let taken = UseOfMemory {
        anonymous: after.anonymous.saturating_sub(before.anonymous),
        arenas: after.arenas.saturating_sub(before.arenas),
    };
    Ok((sessions.into_iter().enumerate().map(client).collect::<Result<_, PerfError>>()?, taken))
}

/// A session takes several descriptors here, too; the daemons inherit the limit.
fn all_descriptors() -> Result<(), PerfError> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .map_err(|e| PerfError::io("raising RLIMIT_NOFILE")(e.into()))
}

/// Every client has a region, and one in so many a CQ and a QP: a CQ takes a descriptor.
const QUEUES_EVERY: usize = 4;
