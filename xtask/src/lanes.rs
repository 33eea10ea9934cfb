//! Builds the workspace's tests, and runs the test binaries in three lanes at the same time.
//!
//! `cargo test` starts one binary after the other, and only when all are built. The longest test of a binary is often
//! alone at its end, on one core, and many tests wait for processes or for time to pass. So tests that wait run while
//! others are compiled, several at a time. Those of systems compute, but are built early, and run then, too. Other
//! tests that compute run when everything is built. They and the compilers have a low priority, and delay the others
//! little.
//!
//! A lane prints the output of a binary when the binary has ended, so that outputs never mix.

use std::io::{BufRead, BufReader};
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

/// Builds the workspace's tests. Returns their binaries; `None` if the build has failed.
pub(crate) fn built(root: &Path, prepare: fn(&mut Command)) -> Option<Vec<Binary>> {
    let messages = cargo::output(build(root, prepare))?;
    Some(String::from_utf8_lossy(&messages).lines().filter_map(binary).collect())
}

/// Returns the command that builds the workspace's tests and prints a message about each of them.
fn build(root: &Path, prepare: fn(&mut Command)) -> Command {
    let arguments =
        ["test", "--workspace", "--locked", "--no-run", "--message-format=json-render-diagnostics"];
    let mut command = cargo(root, &arguments);
    prepare(&mut command);
    command
}

/// Returns the test binary that a message of cargo is about, if it is about one.
fn binary(message: &str) -> Option<Binary> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    // Cargo has just read it. Without the name, tests would be left out.
    let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).expect("the package has a manifest");
    let manifest: toml::Table = manifest.parse().expect("the manifest is valid");
    Some(Binary {
        package: manifest["package"]["name"].as_str().expect("the package has a name").to_owned(),
        target: message["target"]["name"].as_str()?.to_owned(),
        path: message["executable"].as_str()?.into(),
        folder,
    })
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
        let (mut last, mut jobs_of) = (Vec::new(), [0; 3]);
        for job in messages.lines().map_while(Result::ok).filter_map(|line| binary(&line)).flat_map(jobs) {
            jobs_of[job.lane as usize] += 1;
            match job.lane {
                Lane::Last => last.push(job),
                lane => lanes[lane as usize].0.send(job).expect("a lane does not panic"),
            }
        }
        let built = cargo::has_succeeded(building.wait());
        assert!(!built || jobs_of.iter().all(|jobs| *jobs > 0), "a lane has no tests: {jobs_of:?}");
        println!("   tests built in {:.1} s", started.elapsed().as_secs_f64());
        last.into_iter()
            .for_each(|job| lanes[Lane::Last as usize].0.send(job).expect("a lane does not panic"));
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
    let (ran, passed) = match command.stdin(Stdio::null()).output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr);
            (text, output.status.success())
        }
        Err(error) => (format!("cannot start {}: {error}\n", binary.path.display()), false),
    };
    let outcome = if passed { "passed" } else { "FAILED" };
    let selected = if arguments.is_empty() { String::new() } else { format!(" ({})", arguments.join(" ")) };
    let Binary { package, target, .. } = binary;
    let took = started.elapsed().as_secs_f64();
    println!("{ran}   tests '{target}' of {package}{selected} {outcome} in {took:.1} s");
    passed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_about_test_binaries_are_found_among_others() {
        let folder = env!("CARGO_MANIFEST_DIR");
        let message = |reason: &str, test: bool| {
            format!(
                r#"{{"reason":"{reason}","manifest_path":"{folder}/Cargo.toml","target":{{"name":"all"}},
                    "profile":{{"test":{test}}},"executable":"/t/all-1"}}"#
            )
        };
        let found = Binary {
            package: "xtask".to_owned(),
            folder: folder.into(),
            target: "all".to_owned(),
            path: "/t/all-1".into(),
        };
        assert_eq!(binary(&message("compiler-artifact", true)), Some(found));
        assert_eq!(binary(&message("compiler-artifact", false)), None);
        assert_eq!(binary(&message("build-finished", true)), None);
        assert_eq!(binary("not a message"), None);
    }

    #[test]
    fn each_test_is_in_one_job() {
        let binary = |package: &str, target: &str| Binary {
            package: package.to_owned(),
            folder: "/f".into(),
            target: target.to_owned(),
            path: "/t/all-1".into(),
        };
        let lanes = |package, target| -> Vec<(Lane, String)> {
            let jobs = jobs(binary(package, target)).into_iter();
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
