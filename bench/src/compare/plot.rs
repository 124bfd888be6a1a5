//! Two plots of a comparison: latency and bandwidth by size, both with logarithmic axes.

use std::path::{Path, PathBuf};

use plotters::prelude::*;
use rnic_tools::perf::PerfError;
use rnic_tools::perf::spec::{Measure, Op};
use rnic_tools::text::bytes;

use super::sweep::{Compared, Path as Way};

/// Writes `latency.svg` and `bandwidth.svg` into a folder, each only if there are results for it.
/// Returns the files written.
pub fn draw(all: &[Compared], folder: &Path) -> Result<Vec<PathBuf>, PerfError> {
    use SeriesLabelPosition::{LowerRight, UpperLeft};

    std::fs::create_dir_all(folder).map_err(PerfError::io("creating the plot folder"))?;
    let mut written = Vec::new();
    // Both curves rise to the right, so the legends are in the empty corners.
    for (kind, op, name, title, legend) in [
        (Measure::Lat, Op::Send, "latency.svg", "Half a round trip [us]", UpperLeft),
        (Measure::Bw, Op::Write, "bandwidth.svg", "Bandwidth out of one buffer [GB/s]", LowerRight),
    ] {
        let lines = lines(all, kind, op);
        let Some(range) = range(&lines) else { continue };
        let file = folder.join(name);
        let svg = plot(&lines, range, title, legend)
            .map_err(|e| PerfError::Arguments(format!("drawing {}: {e}", file.display())))?;
        std::fs::write(&file, svg).map_err(PerfError::io("writing a plot"))?;
        written.push(file);
    }
    Ok(written)
}

/// Curve of one subject.
#[derive(Debug, PartialEq)]
struct Line {
    name: String,
    colour: RGBColor,
    /// A measurement of rnicd, drawn with a thick line.
    own: bool,
    /// Size and result of each point.
    points: Vec<(f64, f64)>,
}

/// Minimum and maximum of both axes.
type Extent = ((f64, f64), (f64, f64));

fn lines(all: &[Compared], kind: Measure, op: Op) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for compared in all.iter().filter(|c| c.sweep.kind == kind && c.sweep.op == op) {
        let sweep = compared.sweep;
        let points = |name: Option<&str>| -> Vec<(f64, f64)> {
            let point = |row: &crate::report::Row| {
                let figure = match name {
                    None => row.figures.first()?,
                    Some(name) => row.figures.iter().find(|f| f.what.starts_with(name))?,
                };
                let point = (f64::from(row.spec.as_ref()?.size), figure.median);
                (point.0 > 0.0 && point.1 > 0.0 && point.1.is_finite()).then_some(point)
            };
            compared.rows.iter().filter_map(point).collect()
        };
        lines.push(Line {
            name: format!("rnicd, {}", sweep.path.words()),
            colour: own_colour(sweep.path),
            own: true,
            points: points(None),
        });
        for (n, foreign) in sweep.foreign().into_iter().enumerate() {
            let name = foreign.name();
            // Both TCP paths are compared with the same measurements.
            if lines.iter().any(|line| line.name == name) {
                continue;
            }
            let colour = foreign_colour(sweep.path, n);
            lines.push(Line { points: points(Some(&name)), name, colour, own: false });
        }
    }
    lines.retain(|line| !line.points.is_empty());
    lines
}

/// Returns the range of all points with a margin, or `None` without points.
fn range(lines: &[Line]) -> Option<Extent> {
    let points = || lines.iter().flat_map(|line| &line.points);
    let extent = |of: fn(&(f64, f64)) -> f64| {
        let least = points().map(of).min_by(f64::total_cmp)?;
        let greatest = points().map(of).max_by(f64::total_cmp)?;
        Some((least, greatest))
    };
    let sizes = extent(|point| point.0)?;
    let figures = extent(|point| point.1)?;
    Some(((sizes.0 / 1.5, sizes.1 * 1.5), (figures.0 / 2.0, figures.1 * 2.0)))
}

fn plot(
    lines: &[Line],
    (x, y): Extent,
    title: &str,
    legend: SeriesLabelPosition,
) -> Result<String, Box<dyn std::error::Error>> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, PIXELS).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(format!("{title} by size of message"), (FONT, 18))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(56)
            .build_cartesian_2d((x.0..x.1).log_scale().base(2.0), (y.0..y.1).log_scale())?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .bold_line_style(RGBColor(225, 225, 225))
            .x_labels(12)
            .x_label_formatter(&|size| bytes(*size as u64))
            .y_label_formatter(&|figure| format!("{figure}"))
            .label_style((FONT, 13))
            .draw()?;
        for line in lines {
            let style = line.colour.stroke_width(if line.own { 3 } else { 1 });
            chart
                .draw_series(LineSeries::new(line.points.iter().copied(), style))?
                .label(line.name.clone())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], style));
            let dots = line.points.iter();
            let size = if line.own { 4 } else { 3 };
            chart.draw_series(dots.map(|point| Circle::new(*point, size, line.colour.filled())))?;
        }
        chart
            .configure_series_labels()
            .position(legend)
            .background_style(WHITE.mix(0.85))
            .border_style(RGBColor(200, 200, 200))
            .label_font((FONT, 13))
            .draw()?;
        area.present()?;
    }
    Ok(svg)
}

fn own_colour(path: Way) -> RGBColor {
    match path {
        Way::Direct => RGBColor(0, 90, 181),
        Way::Tcp => RGBColor(220, 50, 32),
        Way::TcpWithoutCrc => RGBColor(240, 140, 0),
    }
}

fn foreign_colour(path: Way, n: usize) -> RGBColor {
    match (path, n) {
        (Way::Direct, 0) => RGBColor(60, 150, 200),
        (Way::Direct, _) => RGBColor(110, 110, 190),
        (_, 0) => RGBColor(150, 60, 60),
        (_, _) => RGBColor(190, 130, 110),
    }
}

const PIXELS: (u32, u32) = (800, 520);
const FONT: &str = "sans-serif";

#[cfg(test)]
mod tests {
    use crate::daemon::Setup;

    use super::super::sweep::ALL;
    use super::*;
    use crate::report::{Kind, Row};
    use rnic_tools::perf::report::Figure;

    fn compared(figures: &[(u32, f64)]) -> Compared {
        let sweep = ALL[0];
        let mut rows = vec![Row::failed("x", Kind::Of(sweep.kind), Setup::DIRECT, "why")];
        for (size, figure) in figures {
            let figures = vec![
                Figure::single("Send", "us", *figure),
                Figure::single("UCX posix tag_lat, two CPUs", "us", figure / 2.0),
            ];
            let spec = Some(sweep.spec(*size));
            let kind = Kind::Of(sweep.kind);
            rows.push(Row { spec, ..Row::of("x", kind, "direct", Setup::DIRECT, figures) });
        }
        Compared { sweep, rows }
    }

    #[test]
    fn plots_have_a_line_for_each_subject() {
        let folder = tempfile::tempdir().unwrap();
        let all = [compared(&[(8, 1.5), (512, 2.0), (1 << 20, 90.0)])];
        let written = draw(&all, folder.path()).unwrap();
        assert_eq!(written, [folder.path().join("latency.svg")]);
        let svg = std::fs::read_to_string(&written[0]).unwrap();
        for text in ["<svg", "rnicd, direct path", "UCX posix tag_lat", "</svg>"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(!svg.contains("libfabric"));
    }

    #[test]
    fn invalid_figures_are_not_plotted() {
        let folder = tempfile::tempdir().unwrap();
        for figures in [&[][..], &[(8, 0.0)], &[(8, f64::NAN)], &[(8, f64::INFINITY)]] {
            assert_eq!(draw(&[compared(figures)], folder.path()).unwrap().len(), 0);
        }
        assert_eq!(draw(&[compared(&[(8, 1.0)])], folder.path()).unwrap().len(), 1);
    }
}
