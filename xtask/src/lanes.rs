//! Builds the workspace's tests, and runs the test binaries in three lanes at the same time.
//!
//! `cargo test` starts one binary after the other, and only when all are built. The longest test of a binary is often
//! alone at its end, on one core, and many tests wait for processes or for time to pass. So tests that wait run while
//! others are compiled, several at a time. Those of systems compute, but are built early, and run then, too. Other
//! tests that compute run when everything is built. They and the compilers have a low priority, and delay the others
//! little.
//!
//! Tests of the command line start its program. Cargo does not wait for a program before it reports the tests that
//! start it, so they are held until the program is built, too.
//!
//! A lane prints the output of a binary when the binary has ended, so that outputs never mix. The output is a file, not
//! a pipe, or else a process that a failed test has left behind would keep the lane waiting.
//!
//! Invariant: if everything is built, each test is run once.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use crate::cargo::{self, cargo, niced};

/// Environment variable that sets how many tests of a binary run at the same time.
const THREADS: &str = "RUST_TEST_THREADS";

/// A list of test binaries that run one after the other.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lane {
    /// The command line's tests, which wait more than they compute and take the longest.
    First,
    /// Tests of other packages that need not wait until everything is built.
    Second,
    /// Tests that compute.
    Last,
}

/// The packages whose tests run as soon as they are built, with their lanes.
const WAITING: [(&str, Lane); 4] = [
    ("farside", Lane::First),
    ("farside-node", Lane::Second),
    ("farside-fabrics", Lane::Second),
    ("farside-systems-tests", Lane::Second),
];

/// Parts of the names of the command line's tests that compute.
const COMPUTING: [&str; 2] = ["sim::", "mutants::"];

/// A test binary.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Binary {
    pub(crate) package: String,
    /// Folder of the package, in which cargo starts its tests.
    pub(crate) folder: PathBuf,
    pub(crate) target: String,
    pub(crate) path: PathBuf,
}

/// An executable that cargo has built.
#[derive(Debug, PartialEq)]
enum Built {
    Tests(Binary),
    /// The program of the package with this name.
    Program(String),
}

/// Builds the workspace's tests. Returns their binaries; `None` if the build has failed.
pub(crate) fn built(root: &Path, prepare: fn(&mut Command)) -> Option<Vec<Binary>> {
    let messages = cargo::output(build(root, prepare))?;
    let tests = |message: &str| match artifact(message)? {
        Built::Tests(binary) => Some(binary),
        Built::Program(_) => None,
    };
    Some(String::from_utf8_lossy(&messages).lines().filter_map(tests).collect())
}

/// Returns the command that builds the workspace's tests and prints a message about each of them.
fn build(root: &Path, prepare: fn(&mut Command)) -> Command {
    let arguments =
        ["test", "--workspace", "--locked", "--no-run", "--message-format=json-render-diagnostics"];
    let mut command = cargo(root, &arguments);
    prepare(&mut command);
    command
}

/// Returns what a message of cargo says was built, if it is tests or a program of this workspace.
fn artifact(message: &str) -> Option<Built> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    let path = message["executable"].as_str()?.into();
    let is_test = message["profile"]["test"] == true;
    let is_program = message["target"]["kind"][0] == "bin";
    if message["reason"] != "compiler-artifact" || !(is_test || is_program) {
        return None;
    }
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    // Cargo has just read it. Without the name, tests would be left out.
    let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).expect("the package has a manifest");
    let manifest: toml::Table = manifest.parse().expect("the manifest is valid");
    let package = manifest["package"]["name"].as_str().expect("the package has a name").to_owned();
    if !is_test {
        return Some(Built::Program(package));
    }
    Some(Built::Tests(Binary {
        package,
        folder,
        target: message["target"]["name"].as_str()?.to_owned(),
        path,
    }))
}

/// The tests of a binary that run in one lane.
#[derive(Debug, PartialEq)]
struct Job {
    binary: Binary,
    lane: Lane,
    /// Arguments of the binary that select the tests.
    arguments: Vec<String>,
}

/// Returns the jobs that run all tests of `binary`.
fn jobs(binary: Binary) -> Vec<Job> {
    let waiting = WAITING.iter().find(|(package, _)| *package == binary.package);
    let Some((_, lane)) = waiting else {
        return vec![Job { binary, lane: Lane::Last, arguments: Vec::new() }];
    };
    if binary.package != WAITING[0].0 || binary.target != "all" {
        return vec![Job { binary, lane: *lane, arguments: Vec::new() }];
    }
    let skipped = COMPUTING.iter().flat_map(|part| ["--skip", part]).map(String::from).collect();
    let computing = COMPUTING.map(String::from).into();
    vec![
        Job { binary: binary.clone(), lane: *lane, arguments: skipped },
        Job { binary, lane: Lane::Last, arguments: computing },
    ]
}

/// The jobs that have to wait for the build.
#[derive(Default)]
struct Held {
    /// Those that start the command line's program. Without it, they do not run: they would start that of an earlier
    /// build.
    until_program: Vec<Job>,
    /// Whether the command line's program is built.
    has_program: bool,
    /// Those that wait until everything is built.
    until_end: Vec<Job>,
}

impl Held {
    /// Returns the jobs that can run now that `built` is built, and holds the others.
    fn ready(&mut self, built: Built) -> Vec<Job> {
        let binary = match built {
            Built::Program(package) if package == WAITING[0].0 => {
                self.has_program = true;
                return std::mem::take(&mut self.until_program);
            }
            Built::Program(_) => return Vec::new(),
            Built::Tests(binary) => binary,
        };
        let mut ready = Vec::new();
        for job in jobs(binary) {
            match job.lane {
                Lane::Last => self.until_end.push(job),
                Lane::First if !self.has_program => self.until_program.push(job),
                Lane::First | Lane::Second => ready.push(job),
            }
        }
        ready
    }
}

/// Builds the workspace's tests and runs them. Returns whether all were built and passed.
pub(crate) fn pass(root: &Path, prepare: fn(&mut Command)) -> bool {
    let started = Instant::now();
    let mut command = niced(&build(root, prepare));
    let mut building = match command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn() {
        Ok(building) => building,
        Err(error) => {
            println!(
                "   cannot start cargo: {error}; nothing was built; check that cargo and nice are on PATH"
            );
            return false;
        }
    };
    let messages = BufReader::new(building.stdout.take().expect("the output is piped"));
    std::thread::scope(|scope| {
        let lane = |threads: usize| {
            let (jobs, queue): (Sender<Job>, Receiver<Job>) = channel();
            let ran =
                scope.spawn(move || queue.iter().map(|job| passes(&job, threads)).fold(true, |a, b| a & b));
            (jobs, ran)
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let lanes = [lane(2 * cores), lane(cores), lane(cores)];
        let (mut held, mut started_in) = (Held::default(), [0; 3]);
        let mut start = |job: Job| {
            started_in[job.lane as usize] += 1;
            lanes[job.lane as usize].0.send(job).expect("a lane does not panic");
        };
        for built in messages.lines().map_while(Result::ok).filter_map(|line| artifact(&line)) {
            held.ready(built).into_iter().for_each(&mut start);
        }
        let built = cargo::has_succeeded(building.wait());
        println!("   tests built in {:.1} s", started.elapsed().as_secs_f64());
        if !held.until_program.is_empty() {
            println!("   not run: the tests of {}, whose program was not built", WAITING[0].0);
            assert!(!built, "cargo has reported no program of {}", WAITING[0].0);
        }
        held.until_end.into_iter().for_each(&mut start);
        assert!(!built || started_in.iter().all(|jobs| *jobs > 0), "a lane has no tests: {started_in:?}");
        lanes.into_iter().fold(built, |all, (jobs, ran)| {
            drop(jobs);
            all & ran.join().expect("a lane does not panic")
        })
    })
}

/// Runs the tests of a job, `threads` at a time, and prints their output.
fn passes(job: &Job, threads: usize) -> bool {
    let Job { binary, lane, arguments } = job;
    let started = Instant::now();
    let mut command = Command::new(&binary.path);
    command.args(arguments).current_dir(&binary.folder).env("CARGO_MANIFEST_DIR", &binary.folder);
    if std::env::var_os(THREADS).is_none() {
        command.env(THREADS, threads.to_string());
    }
    if *lane == Lane::Last {
        command = niced(&command);
    }
    let (ran, passed) = output(command)
        .unwrap_or_else(|error| (format!("cannot run {}: {error}\n", binary.path.display()), false));
    let outcome = if passed { "passed" } else { "FAILED" };
    let selected = if arguments.is_empty() { String::new() } else { format!(" ({})", arguments.join(" ")) };
    let Binary { package, target, .. } = binary;
    let took = started.elapsed().as_secs_f64();
    println!("{ran}   tests '{target}' of {package}{selected} {outcome} in {took:.1} s");
    passed
}

/// Runs `command` to its end. Returns what it has printed and whether it succeeded.
///
/// # Errors
/// The command does not start, or there is no room for its output; the error names the folder.
fn output(mut command: Command) -> std::io::Result<(String, bool)> {
    let of_folder = |error: std::io::Error| {
        let folder = std::env::temp_dir();
        let reason = format!("a file for its output in {}: {error}; set TMPDIR", folder.display());
        std::io::Error::new(error.kind(), reason)
    };
    let file = tempfile::tempfile().map_err(of_folder)?;
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file.try_clone()?);
    let status = command.status()?;
    // A process that is left behind shares the file's position, and may still write.
    let mut text = vec![0; file.metadata()?.len() as usize];
    file.read_exact_at(&mut text, 0).map_err(of_folder)?;
    Ok((String::from_utf8_lossy(&text).into_owned(), status.success()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tests(package: &str, target: &str) -> Binary {
        let package = package.to_owned();
        Binary { package, folder: "/f".into(), target: target.to_owned(), path: "/t/all-1".into() }
    }

    #[test]
    fn messages_about_executables_are_found_among_others() {
        let folder = env!("CARGO_MANIFEST_DIR");
        let message = |reason: &str, kind: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason":"{reason}","manifest_path":"{folder}/Cargo.toml","profile":{{"test":{test}}},
                    "target":{{"name":"all","kind":["{kind}"]}},"executable":{executable}}}"#
            )
        };
        let found = |kind, test| artifact(&message("compiler-artifact", kind, test, r#""/t/all-1""#));
        let binary = Binary { folder: folder.into(), ..tests("xtask", "all") };
        assert_eq!(found("test", true), Some(Built::Tests(binary)));
        assert_eq!(found("bin", false), Some(Built::Program("xtask".to_owned())));
        assert_eq!(found("custom-build", false), None);
        assert_eq!(artifact(&message("compiler-artifact", "lib", false, "null")), None);
        assert_eq!(artifact(&message("build-finished", "test", true, r#""/t/all-1""#)), None);
        assert_eq!(artifact("not a message"), None);
    }

    #[test]
    fn tests_that_start_a_program_are_held_until_it_is_built() {
        let program = || Built::Program("farside".to_owned());
        let of = |package: &str| Built::Tests(tests(package, "all"));
        let lanes = |jobs: Vec<Job>| -> Vec<Lane> { jobs.iter().map(|job| job.lane).collect() };
        let mut held = Held::default();
        assert_eq!(lanes(held.ready(of("farside-node"))), [Lane::Second]);
        assert_eq!(lanes(held.ready(of("farside"))), []);
        assert_eq!(lanes(held.ready(Built::Program("xtask".to_owned()))), []);
        assert_eq!(lanes(held.ready(program())), [Lane::First]);
        assert_eq!(lanes(held.ready(program())), []);
        assert_eq!(lanes(held.ready(of("farside-remote"))), []);
        assert_eq!(lanes(held.until_end), [Lane::Last, Lane::Last]);
        let mut program_first = Held::default();
        program_first.ready(program());
        assert_eq!(lanes(program_first.ready(of("farside"))), [Lane::First]);
        let mut without_program = Held::default();
        without_program.ready(of("farside"));
        assert_eq!(lanes(without_program.until_program), [Lane::First]);
    }

    #[test]
    fn a_process_that_tests_leave_behind_keeps_no_lane_waiting() {
        let started = Instant::now();
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo out; echo err >&2; (sleep 30; echo late) & exit 3"]);
        assert_eq!(output(shell).expect("sh runs"), ("out\nerr\n".to_owned(), false));
        assert!(started.elapsed().as_secs() < 20, "the lane waited");
    }

    #[test]
    fn each_test_is_in_one_job() {
        let lanes = |package, target| -> Vec<(Lane, String)> {
            let jobs = jobs(tests(package, target)).into_iter();
            jobs.map(|job| (job.lane, job.arguments.join(" "))).collect()
        };
        let all = String::new;
        assert_eq!(lanes("farside-remote", "all"), [(Lane::Last, all())]);
        assert_eq!(lanes("farside-node", "farside_node"), [(Lane::Second, all())]);
        assert_eq!(lanes("farside", "farside"), [(Lane::First, all())]);
        let waiting = (Lane::First, "--skip sim:: --skip mutants::".to_owned());
        assert_eq!(lanes("farside", "all"), [waiting, (Lane::Last, "sim:: mutants::".to_owned())]);
    }
}
