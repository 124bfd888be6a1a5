//! Cost of the two calls that programs make most often: `post_send` of one request, and `poll_cq`
//! on an empty CQ.
//!
//! Both are measured in this process, on a connected QP with an idle peer. Requests are posted one
//! by one until half of the send queue is full; then the clock stops until they have completed. The
//! result of a round is the median of such runs, which excludes runs interrupted by the scheduler.
//! The daemon is pinned to the first CPU, and the program to the first or the last CPU. A worker on
//! another CPU fetches the cache lines while the program writes them, which adds to the cost.

use std::hint::black_box;
use std::slice::from_ref;
use std::time::{Duration, Instant};

use rnic_client::{Completion, SendRequest};
use rnic_tools::perf::PerfError;
use rnic_tools::perf::driver::Link;
use rnic_tools::perf::measured::Amount;
use rnic_tools::perf::report::Figure;
use rnic_tools::perf::spec::{Flow, Op, Spec, Wait};
use rnic_tools::perf::stats::Series;

use crate::daemon::Setup;
use crate::machine::Pin;
use crate::report::{Goal, Kind, Outcome, Row};
use crate::site::{Options, Site};

/// Measures both calls with a private daemon. Returns a row for each.
pub fn calls(options: &Options<'_>) -> Result<Vec<Row>, PerfError> {
    let amount = options.amount;
    let site = {
        // The daemon inherits the CPU affinity.
        let _pin = Pin::first(None)?;
        Site::start(options.rnicd, Setup::DIRECT)?
    };
    let mut ends = site.open()?;
    let spec = Spec::new(Op::Write, Flow::Stream, 8).stream(DEPTH, 1, 8);
    let spec = Spec { wait: Wait::Polled, ..spec };
    let mut link = Link::new(&ends.context, &mut ends.peer, &spec, 0)?;
    let path = link.end.path()?;
    let (mut apart, mut together, mut polls) = <(Series, Series, Series)>::default();
    // The first round warms up.
    for round in 0..=options.rounds {
        let pin = Pin::last(None)?;
        let far = median(amount, || post_one_by_one(&mut link))?;
        let poll = median(amount, || poll_nothing(&mut link))?;
        drop(pin);
        let pin = Pin::first(None)?;
        let near = median(amount, || post_one_by_one(&mut link))?;
        drop(pin);
        if round > 0 {
            apart.push(far);
            together.push(near);
            polls.push(poll);
        }
    }
    let row = |subject: &str, all: Vec<(&str, Series)>, most| {
        let figure = |(what, series)| Figure::new(what, "ns", u64::from(RUN), series);
        let figures: Vec<Figure> = all.into_iter().map(figure).collect();
        let goal = Some(Goal::AtMost(most));
        let outcome = |figure: &Figure| Outcome::new(&figure.what, figure.median, "ns", goal);
        let outcomes = figures.iter().map(outcome).collect();
        let spec = Some(spec.clone());
        Row { spec, outcomes, ..Row::of(subject, Kind::Call, &path, Setup::DIRECT, figures) }
    };
    Ok(vec![
        row(
            "post_send of one RDMA Write of 8 B",
            vec![("worker on the same CPU", together), ("worker on another CPU", apart)],
            40.0,
        ),
        row("poll_cq on an empty CQ", vec![("one call", polls)], 5.0),
    ])
}

/// Returns nanoseconds per call for half a send queue.
fn post_one_by_one(link: &mut Link) -> Result<f64, PerfError> {
    let to = link.remote.sink.at(0);
    let (qp, completions) = link.end.parts();
    let request = SendRequest::write_inline(0, &[0x5A; 8], to);
    let last = request.signaled();
    let start = Instant::now();
    for _ in 1..RUN {
        qp.post_send(from_ref(&request))?;
    }
    qp.post_send(from_ref(&last))?;
    let elapsed = start.elapsed();
    completions.wait()?;
    Ok(per_call(elapsed))
}

fn poll_nothing(link: &mut Link) -> Result<f64, PerfError> {
    let cq = link.end.parts().1.cq();
    let mut taken = [Completion::default(); 16];
    let start = Instant::now();
    for _ in 0..RUN {
        black_box(cq.poll(&mut taken)?);
    }
    Ok(per_call(start.elapsed()))
}

fn per_call(elapsed: Duration) -> f64 {
    elapsed.as_secs_f64() * 1e9 / f64::from(RUN)
}

/// Returns the median of as many runs as fit in a round.
fn median(
    amount: Amount,
    mut run: impl FnMut() -> Result<f64, PerfError>,
) -> Result<f64, PerfError> {
    let start = Instant::now();
    let mut runs = Series::default();
    loop {
        runs.push(run()?);
        let done = match amount {
            Amount::Time(time) => start.elapsed() >= time,
            Amount::Messages(count) => runs.rounds.len() as u64 * u64::from(RUN) >= count,
        };
        if done {
            return Ok(runs.median().unwrap_or(0.0));
        }
    }
}

/// Depth of the send queue.
const DEPTH: u32 = 1024;
/// Calls in a run.
const RUN: u32 = DEPTH / 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_the_median_of_its_runs() {
        let mut runs = [9.0, 1.0, 5.0].into_iter().cycle();
        let count = Amount::Messages(3 * u64::from(RUN));
        assert_eq!(median(count, || Ok(runs.next().unwrap())).unwrap(), 5.0);
        let mut made = 0;
        let time = Amount::Time(Duration::from_millis(1));
        let run = || {
            made += 1;
            Ok(1.0)
        };
        assert_eq!(median(time, run).unwrap(), 1.0);
        assert!(made > 0);
    }
}
