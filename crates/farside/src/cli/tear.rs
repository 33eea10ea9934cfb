//! `tear`: searches a protocol for schedules in which a reader accepts a torn or stale value.
//!
//! Invariant: a report of a finding includes the command that finds it again.

mod real;

use super::child::Server;
use super::{Done, Failure, duration, files};
use farside_trial::tear::{Coverage, Description, Found, Search, picture, search, shrink, story, truth};
use real::{Real, Sightings};
use serde::Serialize;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Default time for which `--real` runs.
const SECONDS: Duration = Duration::from_secs(2);
/// Maximum time of `--real`.
const SECONDS_MAX: Duration = Duration::from_secs(3_600);
/// Time that the writer's process gets to begin, and to end by itself.
const GRACE: Duration = Duration::from_secs(10);

/// Search a protocol for torn and stale reads: its layout and its steps as verbs, in a TOML file
#[derive(clap::Args)]
#[command(
    after_help = "Exit codes: 0 nothing was found, 1 a torn, stale or lost value, or operations that are stuck, 2 any \
other error."
)]
pub(super) struct Tear {
    /// Description of the protocol (docs/guide/tear.md)
    #[arg(value_name = "FILE.toml")]
    file: PathBuf,
    /// Number of schedules to try
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..))]
    schedules: u64,
    /// Seed of the first schedule; the next schedules have the next seeds
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Let the lines of a WRITE land in any order, as relaxed ordering does
    #[arg(long)]
    relaxed: bool,
    /// Draw the schedule that was found in this file, if there is one
    #[arg(long, value_name = "FILE.svg")]
    svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Run the protocol on this machine's memory in place of schedules: one process writes, one reads, as over shm
    #[arg(long, conflicts_with_all = ["schedules", "seed", "relaxed", "svg"])]
    real: bool,
    /// Time for which --real runs, such as 500ms or 10s [default: 2s]
    #[arg(long, value_name = "TIME", requires = "real", value_parser = duration)]
    seconds: Option<Duration>,
    /// Write to the memory whose descriptor is standard input
    #[arg(long, hide = true, requires = "real")]
    writes: bool,
}

/// Result of a search.
#[derive(Serialize)]
struct Report<'a> {
    name: &'a str,
    file: String,
    relaxed: bool,
    coverage: Coverage,
    found: Option<Tale>,
}

/// A schedule that was found.
#[derive(Serialize)]
struct Tale {
    kind: truth::Kind,
    text: String,
    seed: u64,
    /// Sizes before and after shrinking.
    before: shrink::Size,
    after: shrink::Size,
    schedule: Vec<story::Line>,
    replay: String,
}

impl Tear {
    pub(super) fn run(self) -> Done {
        let protocol = Rc::new(read(&self.file)?);
        if self.real {
            return self.run_real(&protocol);
        }
        if let Some(svg) = &self.svg {
            files::check_writable(svg)?;
        }
        let Tear { seed, schedules, .. } = self;
        let relaxed = self.relaxed || protocol.relaxed;
        let (coverage, found) = search(&protocol, &Search { seed, schedules, relaxed });
        if let (Some(svg), Some(found)) = (&self.svg, &found) {
            files::write(svg, picture::svg(&*protocol, protocol.accept(), &found.plan, &found.ran))?;
        }
        let found = found.map(|found| self.tale(&protocol, &found));
        let sentence = found.as_ref().map(|found| format!("{}: {}", protocol.name, found.kind.sentence()));
        let report =
            Report { name: &protocol.name, file: self.file.display().to_string(), relaxed, coverage, found };
        if self.json {
            print_line!("{}", serde_json::to_string(&report)?);
        } else {
            print(&report)?;
        }
        if self.svg.is_some() && sentence.is_none() {
            note!("farside: no picture written, since nothing was found");
        }
        sentence.map_or(Ok(()), |sentence| Err(Failure::NotGood(sentence)))
    }

    /// Runs the protocol on real memory, with a child process that writes.
    fn run_real(&self, protocol: &Description) -> Done {
        let time = self.seconds.unwrap_or(SECONDS);
        if time.is_zero() || time > SECONDS_MAX {
            return Err(Failure::Error(format!(
                "--real cannot run for {} s: give --seconds from 1ms to 1h",
                time.as_secs_f64()
            )));
        }
        if self.writes {
            let memory = Real::attach(io::stdin().as_fd().try_clone_to_owned()?)?;
            memory.write(protocol, time + GRACE);
            return Ok(());
        }
        let memory = Real::create(protocol)?;
        let mut command = std::process::Command::new(std::env::current_exe()?);
        command.arg("tear").arg(&self.file).args(["--real", "--writes", "--seconds"]);
        command.arg(format!("{}s", time.as_secs_f64()));
        command.stdin(Stdio::from(memory.fd().try_clone_to_owned()?)).stdout(Stdio::null());
        let mut writer = Server::start(&mut command)?;
        let since = Instant::now();
        while !memory.has_begun() {
            if let Some(status) = writer.has_ended()? {
                return Err(Failure::Error(format!(
                    "the process that writes has ended ({status}): see its message above, and run the command again"
                )));
            }
            if since.elapsed() > GRACE {
                return Err(Failure::Error(
                    "the process that writes has not written for 10 s: its steps never reach update; change the \
                     writers"
                        .to_owned(),
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let sightings = memory.read(protocol, time);
        writer.end()?;
        self.report_real(protocol, &sightings, time)
    }

    fn report_real(&self, protocol: &Description, sightings: &Sightings, time: Duration) -> Done {
        let Sightings { writes, writes_again, accepted, again, torn, stale, unjudged, first } = sightings;
        if self.json {
            let report = serde_json::json!({
                "name": protocol.name,
                "file": self.file.display().to_string(),
                "seconds": time.as_secs_f64(),
                "real": sightings,
            });
            print_line!("{report}");
        } else {
            let name = &protocol.name;
            print_line!("{name}: {:.1} s on real memory, which a CPU copies by 16 bytes", time.as_secs_f64());
            print_line!("writer    {writes} writes, {writes_again} attempts started again");
            print_line!("reader    {accepted} reads accepted, {again} attempts started again");
            print_line!("seen      {torn} torn, {stale} stale, {unjudged} too long to tell whether stale");
            if let Some(first) = first {
                print_line!("first     {first}");
            }
        }
        match torn + stale {
            0 => Ok(()),
            wrong => {
                Err(Failure::NotGood(format!("{}: torn or stale values accepted: {wrong}", protocol.name)))
            }
        }
    }

    fn tale(&self, protocol: &Description, found: &Found) -> Tale {
        let (_, finding) = found.ran.finding.as_ref().expect("a found run has a finding");
        let relaxed = if self.relaxed { " --relaxed" } else { "" };
        let replay =
            format!("farside tear {} --seed {} --schedules 1{relaxed}", self.file.display(), found.seed);
        let [before, after] = found.sizes;
        Tale {
            kind: finding.kind,
            text: finding.text.clone(),
            seed: found.seed,
            before,
            after,
            schedule: story::tell(protocol, protocol.accept(), &found.plan, &found.ran),
            replay,
        }
    }
}

/// Reads and parses a description.
fn read(path: &Path) -> Result<Description, Failure> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        Failure::Error(format!(
            "cannot read '{}': {error}; name a description, such as one of examples/tear",
            path.display()
        ))
    })?;
    Description::parse(&text).map_err(|unusable| {
        let line = unusable.line.map_or(String::new(), |line| format!(":{line}"));
        Failure::Error(format!("{}{line}: {}", path.display(), unusable.reason))
    })
}

fn print(report: &Report<'_>) -> Done {
    let Coverage { schedules, orders, writes, accepted, again, torn_reads } = report.coverage;
    match &report.found {
        None => print_line!("{}: no tear in {schedules} schedules", report.name),
        Some(found) => {
            print_line!("{}: {}", report.name, found.kind.sentence());
            print_line!("found     by schedule {schedules}, seed {}", found.seed);
        }
    }
    let order = if report.relaxed { "in any order" } else { "in the order of their addresses" };
    print_line!("coverage  {writes} writes, {accepted} reads accepted, {again} attempts started again");
    print_line!(
        "          {torn_reads} torn READs, {orders} orders of accesses; lines of a WRITE land {order}"
    );
    let Some(Tale { text, before, after, schedule, replay, .. }) = &report.found else { return Ok(()) };
    let counts = [
        ("operations", before.operations, after.operations),
        ("writes", before.writes, after.writes),
        ("events", before.events, after.events),
    ];
    let counts = counts.map(|(what, before, after)| format!("{what} {before} to {after}"));
    print_line!("shrunk    {}", counts.join(", "));
    print_line!("\n{}", story::table(schedule));
    print_line!("So {text}.\nreplay    {replay}");
    Ok(())
}
