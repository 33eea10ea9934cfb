//! Prints results in perftest's format: with its columns, its lines around the table, and as JSON.
//!
//! Invariant: columns have perftest's names, order and units. Perftest's lines about RDMA devices are omitted.

use super::place::Place;
use super::work::{Bandwidth, Latency, Request, Until};
use crate::cli::{Done, Failure, human_bytes};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

/// Format in which results are printed.
pub(super) struct Format {
    pub(super) gbits: bool,
    pub(super) json: bool,
}

/// Result of the test at one request size.
pub(super) enum Row {
    Latency(Latency),
    Bandwidth(Bandwidth),
}

/// Report of one test, with the results at all sizes.
pub(super) struct Report {
    format: Format,
    info: Info,
    results: Vec<Value>,
}

struct Info {
    test: String,
    request: Request,
    fabric: &'static str,
    node: String,
    page_size: Option<u64>,
    /// Number of requests in flight of a bandwidth test; `None` for a latency test.
    depth: Option<u32>,
    until: Until,
    /// Duration of one reading of the clock, in nanoseconds.
    clock_ns: f64,
}

impl Info {
    /// Describes the CPU that runs the requests.
    fn runs_on(&self) -> &'static str {
        match (self.fabric, self.request) {
            ("local", _) => "the client's CPU, in the node's process",
            ("shm", Request::Call) => "the node's CPU",
            ("shm", _) => "the client's CPU, on the node's memory",
            _ => "the node's CPU, by an engine",
        }
    }
}

const LINE: &str = "---------------------------------------------------------------------------------------";
const MIB: f64 = (1 << 20) as f64;

impl Report {
    /// Creates the report of `test`, without results. `depth` is the number of requests in flight of a bandwidth test.
    pub(super) fn new(
        format: Format,
        place: &Place,
        test: String,
        request: Request,
        depth: Option<u32>,
        until: Until,
    ) -> Report {
        let (fabric, node, clock_ns) = (place.pool.fabric(), place.node.clone(), clock_ns());
        let page_size = place.pool.info().ok().map(|info| info.page_size);
        let info = Info { test, request, fabric, node, page_size, depth, until, clock_ns };
        Report { format, info, results: Vec::new() }
    }

    /// Prints the result at one request size, in bytes. Before the first result, also prints the table's header.
    ///
    /// # Errors
    /// Standard output is closed.
    pub(super) fn print(&mut self, size: usize, row: &Row) -> Done {
        let columns = self.columns(size, row);
        if self.format.json {
            let mut object = Map::new();
            object.insert("test".into(), self.info.test.clone().into());
            object.insert("fabric".into(), self.info.fabric.into());
            object.insert("tx_depth".into(), self.info.depth.unwrap_or(1).into());
            object.extend(columns.iter().map(|column| (column.key.to_owned(), column.value.clone())));
            print_line!("{}", Value::Object(object));
        } else {
            if self.results.is_empty() {
                self.head(row, &columns)?;
            }
            let cells =
                columns.iter().map(|column| format!("{:<width$}", column.text, width = column.name.len()));
            print_line!(" {}", cells.collect::<Vec<_>>().join("  ").trim_end());
        }
        let object: Map<String, Value> =
            columns.into_iter().map(|column| (column.perftest.to_owned(), column.value)).collect();
        self.results.push(Value::Object(object));
        Ok(())
    }

    /// Prints the end of the table, unless the format is JSON.
    ///
    /// # Errors
    /// Standard output is closed.
    pub(super) fn end(&self) -> Done {
        if !self.format.json {
            print_line!("{LINE}");
        }
        Ok(())
    }

    /// Writes the report to a file as JSON. Its `results` are an object for one size, or a list of objects for several.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn write(mut self, path: &Path) -> Done {
        let results = match self.results.len() {
            1 => self.results.remove(0),
            _ => Value::Array(self.results),
        };
        let runs_on = self.info.runs_on();
        let Info { test, request, fabric, node, page_size, depth, until, clock_ns } = self.info;
        let mut info = json!({
            "test": test,
            "request": request.about(),
            "runs_on": runs_on,
            "fabric": fabric,
            "node": node,
            "page_size": page_size,
            "TX_depth": depth.unwrap_or(1),
            "clock_ns": rounded(clock_ns, 1),
            "bandwidth_unit": depth.map(|_| unit(self.format.gbits)),
            "latency": depth.is_none().then_some("full round trip"),
        });
        match until {
            Until::Iterations(iterations) => info["iterations"] = iterations.into(),
            Until::Time(duration) => info["duration_s"] = duration.as_secs_f64().into(),
        }
        let text = format!("{:#}\n", json!({ "test_info": info, "results": results }));
        std::fs::write(path, text).map_err(|error| unwritable(path, &error))
    }

    fn head(&self, row: &Row, columns: &[Column]) -> Done {
        let info = &self.info;
        print_line!("{LINE}");
        let kind = if info.depth.is_none() { "Latency" } else { "BW" };
        print_line!("{:>20}{} {kind} Test", "", info.request.name());
        let pages = info.page_size.map_or_else(|| "unknown".into(), human_bytes);
        print_line!(" Fabric          : {:<14} Node            : {}", info.fabric, info.node);
        print_line!(" TX depth        : {:<14} Pages           : {pages}", info.depth.unwrap_or(1));
        print_line!(" Request         : {}", info.request.about());
        print_line!(" Runs on         : {}", info.runs_on());
        match row {
            Row::Latency(_) => {
                print_line!(" Latency         : a full round trip, until the client knows that it is done");
                print_line!(" Clock           : {:.0}[nsec] to read, within each latency", info.clock_ns);
            }
            Row::Bandwidth(bandwidth) => {
                print_line!(" BW peak         : of the best {} requests in a row", bandwidth.stretch);
            }
        }
        print_line!("{LINE}");
        let names: Vec<&str> = columns.iter().map(|column| column.name).collect();
        print_line!(" {}", names.join("  "));
        Ok(())
    }

    fn columns(&self, size: usize, row: &Row) -> Vec<Column> {
        let iterations = match row {
            Row::Latency(latency) => latency.iterations,
            Row::Bandwidth(bandwidth) => bandwidth.iterations,
        };
        let mut columns = vec![
            Column::count("#bytes", "bytes", "MsgSize", size as u64),
            Column::count("#iterations", "iterations", "n_iterations", iterations),
        ];
        match row {
            Row::Latency(latency) => columns.extend([
                Column::us("t_min[usec]", "t_min_us", "t_min", latency.min_ns / 1e3),
                Column::us("t_max[usec]", "t_max_us", "t_max", latency.max_ns / 1e3),
                Column::us("t_typical[usec]", "t_typical_us", "t_typical", latency.percentile_us(50.0)),
                Column::us("t_avg[usec]", "t_avg_us", "t_avg", latency.mean_ns / 1e3),
                Column::us("t_stdev[usec]", "t_stdev_us", "t_stdev", latency.stdev_ns() / 1e3),
                Column::us("99% percentile[usec]", "p99_us", "percentile_99", latency.percentile_us(99.0)),
                Column::us(
                    "99.9% percentile[usec]",
                    "p999_us",
                    "percentile_99_9",
                    latency.percentile_us(99.9),
                ),
            ]),
            Row::Bandwidth(bandwidth) => {
                let bytes = size as f64;
                let in_unit = |per_s: f64| match self.format.gbits {
                    true => per_s * bytes * 8.0 / 1e9,
                    false => per_s * bytes / MIB,
                };
                let [peak, average] = [in_unit(bandwidth.peak_per_s), in_unit(bandwidth.per_s)];
                columns.extend(match self.format.gbits {
                    true => [
                        Column::rate("BW peak[Gb/sec]", "bw_peak_gbit_per_s", "BW_peak", peak),
                        Column::rate("BW average[Gb/sec]", "bw_average_gbit_per_s", "BW_average", average),
                    ],
                    false => [
                        Column::rate("BW peak[MiB/sec]", "bw_peak_mib_per_s", "BW_peak", peak),
                        Column::rate("BW average[MiB/sec]", "bw_average_mib_per_s", "BW_average", average),
                    ],
                });
                let rate = bandwidth.per_s / 1e6;
                columns.push(Column::new(
                    "MsgRate[Mpps]",
                    "msg_rate_mpps",
                    "MsgRate",
                    format!("{rate:.6}"),
                    rate,
                ));
            }
        }
        columns
    }
}

/// A column of a result: its number, and the number's names.
struct Column {
    /// Name of the number in the table.
    name: &'static str,
    /// Name of the number in `--json`.
    key: &'static str,
    /// Perftest's name of the number, in the file of `--out_json`.
    perftest: &'static str,
    text: String,
    value: Value,
}

impl Column {
    fn new(
        name: &'static str,
        key: &'static str,
        perftest: &'static str,
        text: String,
        value: impl Into<Value>,
    ) -> Column {
        Column { name, key, perftest, text, value: value.into() }
    }

    fn count(name: &'static str, key: &'static str, perftest: &'static str, count: u64) -> Column {
        Column::new(name, key, perftest, count.to_string(), count)
    }

    /// Returns a column of microseconds with three decimals, because an op on mapped memory takes a fraction of a
    /// microsecond.
    fn us(name: &'static str, key: &'static str, perftest: &'static str, us: f64) -> Column {
        Column::new(name, key, perftest, format!("{us:.3}"), rounded(us, 3))
    }

    fn rate(name: &'static str, key: &'static str, perftest: &'static str, rate: f64) -> Column {
        // In either unit, rates of small requests are far below 1, so they need more decimals.
        let text = if rate < 0.1 { format!("{rate:.6}") } else { format!("{rate:.2}") };
        Column::new(name, key, perftest, text, rounded(rate, 6))
    }
}

/// Rounds a number to `digits` decimals.
fn rounded(number: f64, digits: i32) -> f64 {
    let unit = 10f64.powi(digits);
    (number * unit).round() / unit
}

fn unit(gbits: bool) -> &'static str {
    if gbits { "Gb/sec" } else { "MiB/sec" }
}

/// Measures the duration of one reading of the clock, in nanoseconds. Returns the minimum of 20 means, which excludes
/// interruptions.
fn clock_ns() -> f64 {
    const READINGS: u32 = 500;
    let rounds = (0..20).map(|_| {
        let began = Instant::now();
        let last = (0..READINGS).fold(began, |_, _| std::hint::black_box(Instant::now()));
        (last - began).as_nanos() as f64 / f64::from(READINGS)
    });
    rounds.fold(f64::INFINITY, f64::min)
}

/// Checks that the file at `path` can be written. Does not change its content.
///
/// # Errors
/// The file cannot be written.
pub(super) fn check_writable(path: &Path) -> Done {
    let opened = std::fs::File::options().append(true).create(true).open(path);
    opened.and_then(|mut file| file.flush()).map_err(|error| unwritable(path, &error))
}

fn unwritable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::Error(format!(
        "could not write the result to {}: {error}; name a writable file with --out_json_file",
        path.display()
    ))
}
