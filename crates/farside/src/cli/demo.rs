//! `demo`: shows what Farside does, in under two minutes, as text and as a web page.
//!
//! Invariant: every figure is measured in this run. The node runs in its own process, unless the line of the figure
//! says `local`.
//! Invariant: the demo overwrites no file except its own pages and empty files.

mod measure;
mod page;
mod picture;

use super::machine::Machine;
use super::{Done, Failure, files, value_size};
use farside_bench::compare::rows::{self, CompareReport};
use farside_bench::report::{FloorReport, Table, YcsbReport};
use measure::{Results, Settings};
use serde::Serialize;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Start a node, fill it, read it while the node's process is stopped, and compare every fabric with the floor and with
/// installed rivals; prints text and writes a web page.
#[derive(clap::Args)]
pub(super) struct Demo {
    /// Records in the store
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1000..=1 << 26))]
    records: u64,
    /// Bytes per value, 32 to 60000
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = value_size)]
    value_size: u32,
    /// Seconds of each measurement
    #[arg(long, value_name = "S", default_value_t = 0.5)]
    seconds: f64,
    /// File for the page, which contains all figures and tables
    #[arg(long, value_name = "FILE", default_value = "farside-demo.html")]
    html: PathBuf,
    /// Write no page
    #[arg(long, conflicts_with = "html")]
    no_html: bool,
    /// Skip Redis, memcached and LMDB, which are compared with Farside if they are installed
    #[arg(long)]
    no_rivals: bool,
    /// Print all measurements as one JSON object a line, instead of text
    #[arg(long)]
    json: bool,
}

/// One line of the output of `--json`.
#[derive(Serialize)]
#[serde(tag = "measured", rename_all = "kebab-case")]
enum Row<'a> {
    Machine(&'a Machine),
    Stopped(&'a measure::Stopped),
    Floor(&'a FloorReport),
    Ycsb(&'a YcsbReport),
    Compare(&'a CompareReport),
}

impl Demo {
    pub(super) fn run(self) -> Done {
        if !(0.1..=60.0).contains(&self.seconds) {
            return Err(Failure::Error(format!("--seconds {}: give 0.1 to 60", self.seconds)));
        }
        if !(32..=60_000).contains(&self.value_size) {
            return Err(Failure::Error(format!("--value-size {}: give 32 to 60000", self.value_size)));
        }
        let page = (!self.no_html).then_some(&*self.html);
        page.map_or(Ok(()), check_may_write)?;
        let began = Instant::now();
        note!(
            "A store of {} records of {} bytes, uniformly read; one client thread.",
            self.records,
            self.value_size
        );
        let each = Duration::from_secs_f64(self.seconds);
        let settings = Settings { records: self.records, value_size: self.value_size, each };
        let mut results = settings.measure()?;
        if !self.json {
            print_stopped(&results)?;
            print_runs(&results)?;
        }
        if !self.no_rivals {
            results.compare()?;
        }
        results.machine.record_end_load();
        if self.json {
            print_rows(&results)?;
        } else {
            print_compared(&results)?;
        }
        if let Some(page) = page {
            files::write(page, page::page(&results))?;
        }
        let path = page.map(|page| std::path::absolute(page).unwrap_or_else(|_| page.to_owned()));
        if self.json {
            path.iter().for_each(|path| note!("The same as a web page with figures: {}", path.display()));
            return Ok(());
        }
        if let Some(path) = path {
            print_line!("The same as a web page with figures: {}", path.display());
        }
        let seconds = began.elapsed().as_secs_f64();
        print_line!("Done in {seconds:.0} s. Next: 'farside up', and what it suggests.");
        Ok(())
    }
}

/// Checks that the page can be written to `path`: a new file, an empty one, or an earlier page of the demo.
fn check_may_write(path: &Path) -> Done {
    let otherwise = "name another with --html FILE, or omit the page with --no-html";
    files::check_writable(path).map_err(|failure| match failure {
        Failure::Error(reason) => {
            Failure::Error(format!("{reason}, with --html FILE, or omit the page with --no-html"))
        }
        other => other,
    })?;
    if !path.is_file() {
        return Ok(()); // A new file, or a pipe.
    }
    let mut start = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(page::MARKED_WITHIN).read_to_end(&mut start))
        .map_err(|error| Failure::Error(format!("cannot read '{}': {error}; {otherwise}", path.display())))?;
    let is_ours = start.windows(page::MARK.len()).any(|bytes| bytes == page::MARK.as_bytes());
    match is_ours || start.is_empty() {
        true => Ok(()),
        false => Err(Failure::Error(format!(
            "'{}' exists and is not a page of 'farside demo': {otherwise}",
            path.display()
        ))),
    }
}

fn print_stopped(results: &Results) -> Done {
    let stopped = &results.stopped;
    let [before, during, after] =
        [stopped.before_ops_per_s, stopped.while_ops_per_s, stopped.after_ops_per_s].map(|rate| rate / 1e6);
    print_line!("The node is process {}. A connected client reads", stopped.pid);
    print_line!("  before 'kill -STOP' {before:>6.2} million values a second");
    print_line!("  while it is stopped {during:>6.2} million values a second");
    print_line!("  after 'kill -CONT'  {after:>6.2} million values a second");
    print_line!();
    Ok(())
}

fn print_runs(results: &Results) -> Done {
    let mut table = Table::new([
        "fabric",
        "workload",
        "at once",
        "ops/s",
        "p50 us",
        "p99 us",
        "round trips",
        "client s/Mop",
        "node s/Mop",
        "of the floor's rate",
    ]);
    for run in &results.runs {
        table.push([
            run.fabric.clone(),
            run.workload.clone(),
            run.tasks.to_string(),
            format!("{:.0}", run.ops_per_s),
            format!("{:.2}", run.latency_us.p50),
            format!("{:.2}", run.latency_us.p99),
            format!("{:.2}", run.per_op.round_trips),
            format!("{:.2}", run.cpu_s_per_mop.client),
            or_dash(run.cpu_s_per_mop.node),
            or_dash(results.of_floor(run)),
        ]);
    }
    for floor in &results.floors {
        let name = match &*floor.fabric {
            "shm" => "by hand".to_owned(),
            other => format!("by hand, {other}"),
        };
        let (client, server) = floor.cpu_s_per_mop.map(|cpu| (cpu.client, cpu.server)).unzip();
        table.push([
            name,
            floor.workload.clone(),
            floor.tasks.to_string(),
            format!("{:.0}", floor.ops_per_s),
            format!("{:.2}", floor.rtt_us_p50),
            "-".into(),
            "-".into(),
            or_dash(client),
            or_dash(server),
            "1.00".into(),
        ]);
    }
    print_line!("{table}");
    print_line!(
        "Workload c reads; a is half reads and half overwrites. Each is compared with its own floor."
    );
    print_line!(
        "local and shm are compared with 'by hand', tls with tcp's floor. s/Mop: CPU seconds per million operations."
    );
    Ok(())
}

fn print_compared(results: &Results) -> Done {
    let way = |report: &CompareReport| (report.depth, report.cores);
    for group in results.compared.chunk_by(|one, next| way(one) == way(next)) {
        print_line!();
        print_line!("{}:", page::setup_of(group));
        print_line!("{}", rows::table(group).to_string().trim_end());
    }
    if !results.compared.is_empty() {
        print_line!("'farside bench compare' prints more, with notes on how to read it.");
    }
    for reported in &results.skipped {
        print_line!("Left out: {reported}.");
    }
    print_line!();
    Ok(())
}

fn print_rows(results: &Results) -> Done {
    let rows = [Row::Machine(&results.machine), Row::Stopped(&results.stopped)];
    let rows = rows.into_iter().chain(results.floors.iter().map(Row::Floor));
    let rows =
        rows.chain(results.runs.iter().map(Row::Ycsb)).chain(results.compared.iter().map(Row::Compare));
    for row in rows {
        print_line!("{}", serde_json::to_string(&row)?);
    }
    Ok(())
}

fn or_dash(number: Option<f64>) -> String {
    number.map_or_else(|| "-".into(), |number| format!("{number:.2}"))
}
