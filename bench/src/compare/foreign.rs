//! Benchmarks of other projects: their command lines, and the parsing of their output.
//!
//! `ucx_perftest` of UCX and `fi_pingpong` of libfabric, over TCP and over shared memory. Both use
//! a single buffer. Results are read by the names of the output columns; any other output is an
//! error.

use rnic_tools::perf::spec::Measure;

use super::pair::Pair;

/// A measurement of another project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// Transport of the messages.
    pub transport: Transport,
    /// Test program and mode.
    pub test: Test,
}

/// Transport of another project's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP over the loopback interface.
    Tcp,
    /// Memory that both processes share.
    Shared,
}

/// Test program and mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    /// UCX: a ping-pong of matched messages.
    TagLat,
    /// UCX: a ping-pong of puts.
    PutLat,
    /// UCX: a stream of matched messages.
    TagBw,
    /// UCX: a stream of puts.
    PutBw,
    /// libfabric: a ping-pong of messages.
    PingPong,
}

impl Foreign {
    /// Returns the name of the program.
    pub fn program(self) -> &'static str {
        match self.test {
            Test::PingPong => "fi_pingpong",
            _ => "ucx_perftest",
        }
    }

    /// Returns the Debian package of the program.
    pub fn package(self) -> &'static str {
        match self.test {
            Test::PingPong => "libfabric-bin",
            _ => "ucx-utils",
        }
    }

    /// Returns the name used in tables.
    pub fn name(self) -> String {
        let transport = match (self.transport, self.test) {
            (Transport::Tcp, _) => "tcp",
            (Transport::Shared, Test::PingPong) => "shm",
            (Transport::Shared, _) => "posix",
        };
        match self.test {
            Test::PingPong => format!("libfabric {transport}"),
            test => format!("UCX {transport} {}", ucx_name(test)),
        }
    }

    /// Returns the command lines for `count` messages, or round trips, of `size` bytes at a port.
    pub fn pair(self, size: u32, count: u64, port: u16) -> Pair {
        let texts = |words: &str| words.split_whitespace().map(str::to_owned).collect();
        match self.test {
            Test::PingPong => {
                let provider = match self.transport {
                    Transport::Tcp => "-p tcp -e msg",
                    Transport::Shared => "-p shm -e rdm",
                };
                let common = format!("{provider} -I {count} -S {size}");
                Pair {
                    program: self.program(),
                    environment: vec![("FI_TCP_IFACE", "lo")],
                    server: texts(&format!("{common} -B {port}")),
                    client: texts(&format!("{common} -P {port} 127.0.0.1")),
                }
            }
            test => {
                let transports = match self.transport {
                    Transport::Tcp => "tcp,self",
                    Transport::Shared => "posix,self",
                };
                let test = ucx_name(test);
                let warm = (count / 10).max(1);
                let client =
                    format!("-t {test} -s {size} -n {count} -w {warm} -f -v 127.0.0.1 -p {port}");
                Pair {
                    program: self.program(),
                    environment: vec![
                        ("UCX_TLS", transports),
                        ("UCX_NET_DEVICES", "lo"),
                        ("UCX_WARN_UNUSED_ENV_VARS", "n"),
                    ],
                    server: texts(&format!("-p {port}")),
                    client: texts(&client),
                }
            }
        }
    }

    /// Parses the client's output. Returns messages per second of a stream, or half a round trip in
    /// microseconds.
    pub fn figure(self, kind: Measure, printed: &str) -> Result<f64, String> {
        let figure = match (self.test, kind) {
            (Test::PingPong, _) => column(printed, ' ', "usec/xfer"),
            // The median, as for our own results; the mean includes disturbances by the machine.
            (_, Measure::Lat) => column(printed, ',', "50.0_percentile_lat"),
            _ => column(printed, ',', "overall_mr"),
        };
        let figure = figure.ok_or_else(|| match printed.trim().lines().last() {
            Some(line) => format!("its output is not understood: {line}"),
            None => "it printed nothing".to_owned(),
        })?;
        if figure.is_finite() && figure > 0.0 {
            Ok(figure)
        } else {
            Err(format!("{figure} is not a valid result"))
        }
    }
}

fn ucx_name(test: Test) -> &'static str {
    match test {
        Test::TagLat => "tag_lat",
        Test::PutLat => "ucp_put_lat",
        Test::TagBw => "tag_bw",
        Test::PutBw => "ucp_put_bw",
        Test::PingPong => "",
    }
}

/// Returns the number in the column `name` of the last line that has the same number of fields as
/// the header line.
fn column(printed: &str, separator: char, name: &str) -> Option<f64> {
    let fields = |line: &str| -> Vec<String> {
        line.split(separator).map(str::trim).filter(|f| !f.is_empty()).map(str::to_owned).collect()
    };
    let mut lines = printed.lines().map(fields).skip_while(|line| !line.iter().any(|f| f == name));
    let head = lines.next()?;
    let at = head.iter().position(|field| field == name)?;
    let last = lines.filter(|line| line.len() == head.len()).last()?;
    last.get(at)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ucx(test: Test) -> Foreign {
        Foreign { transport: Transport::Tcp, test }
    }

    const UCX: &str = "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,\
                       avg_mr,overall_mr\n5000,4.750,4.875,4.875,1.56,1.56,205107,205109\n";
    const FABRIC: &str = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   \
                          Mxfers/sec\n1m      2k      =2k      3.9g        0.81s   5194.49     \
                          201.86       0.00\n";

    #[test]
    fn figures_are_found_by_their_heads() {
        assert_eq!(ucx(Test::TagLat).figure(Measure::Lat, UCX), Ok(4.75));
        assert_eq!(ucx(Test::PutBw).figure(Measure::Rate, UCX), Ok(205_109.0));
        assert_eq!(ucx(Test::PingPong).figure(Measure::Lat, FABRIC), Ok(201.86));
        let noisy = format!("[time] a warning, of one line\n{UCX}\nbye\n");
        assert_eq!(ucx(Test::TagBw).figure(Measure::Bw, &noisy), Ok(205_109.0));
    }

    #[test]
    fn unknown_output_is_an_error() {
        let head = UCX.lines().next().unwrap();
        let words = UCX.replace("4.750", "soon");
        for printed in ["", "\n", "no such option", head, FABRIC, &words, &UCX.replace(',', ";")] {
            let e = ucx(Test::TagLat).figure(Measure::Lat, printed).unwrap_err();
            assert!(e.contains("nothing") || e.contains("not understood"), "{e}");
        }
        for wrong in ["nan", "-1.0", "0", "inf"] {
            let printed = UCX.replace("4.750", wrong);
            let e = ucx(Test::TagLat).figure(Measure::Lat, &printed).unwrap_err();
            assert!(e.contains("not a valid result"), "{wrong}: {e}");
        }
        for end in 0..FABRIC.len() {
            let _ = ucx(Test::PingPong).figure(Measure::Lat, &FABRIC[..end]);
            let _ = ucx(Test::TagLat).figure(Measure::Lat, &UCX[..end.min(UCX.len())]);
        }
    }

    #[test]
    fn command_lines_have_transport_size_and_port() {
        let pair = Foreign { transport: Transport::Shared, test: Test::PutBw }.pair(8, 1000, 7000);
        assert_eq!(
            pair.client.join(" "),
            "-t ucp_put_bw -s 8 -n 1000 -w 100 -f -v 127.0.0.1 -p 7000"
        );
        assert!(pair.environment.contains(&("UCX_TLS", "posix,self")));
        assert_eq!(pair.server.join(" "), "-p 7000");
        let pair = ucx(Test::PingPong).pair(64, 5, 7000);
        assert_eq!(pair.client.join(" "), "-p tcp -e msg -I 5 -S 64 -P 7000 127.0.0.1");
        assert_eq!(pair.server.join(" "), "-p tcp -e msg -I 5 -S 64 -B 7000");
    }

    #[test]
    fn names_are_those_of_the_programs() {
        let shared = |test| Foreign { transport: Transport::Shared, test };
        assert_eq!(shared(Test::PingPong).name(), "libfabric shm");
        assert_eq!(shared(Test::TagLat).name(), "UCX posix tag_lat");
        assert_eq!(ucx(Test::PutLat).name(), "UCX tcp ucp_put_lat");
        assert_eq!(
            (ucx(Test::TagBw).package(), shared(Test::PingPong).program()),
            ("ucx-utils", "fi_pingpong")
        );
    }
}
