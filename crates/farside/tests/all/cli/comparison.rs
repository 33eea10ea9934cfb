//! `bench compare`: its JSON for scripts, its refusals, and its cleanup.

use crate::support::{PATIENCE, Process, command, farside, run, until};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Returns this process's `PATH`, in which the rivals' programs are searched.
fn path() -> std::ffi::OsString {
    std::env::var_os("PATH").unwrap_or_default()
}

/// Whether a rival is installed; if not, prints that the rival's part of the test is skipped.
fn is_here(program: &str) -> bool {
    let is_here = std::env::split_paths(&path()).any(|folder| folder.join(program).is_file());
    if !is_here {
        println!("{program} is not on PATH: its part of this test is skipped");
    }
    is_here
}

const TINY: [&str; 8] = ["bench", "compare", "--records", "2000", "--rounds", "2", "--seconds", "0.01"];

/// Runs a tiny comparison; returns the lines of its JSON output.
fn compared(arguments: &[&str]) -> Vec<serde_json::Value> {
    let mut command = command();
    command.env("PATH", path()).args(TINY).arg("--json").args(arguments);
    let reported = run(command, b"").done();
    reported.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn contenders(lines: &[serde_json::Value]) -> BTreeSet<&str> {
    lines.iter().map(|line| line["contender"].as_str().expect("a name")).collect()
}

fn number(value: &serde_json::Value) -> f64 {
    value.as_f64().unwrap_or(-1.0)
}

#[test]
fn every_installed_contender_is_measured_under_every_setup() {
    let (redis, memcached) = (is_here("redis-server"), is_here("memcached"));
    let cores = rustix::thread::sched_getaffinity(None).expect("the cores are known").count();
    let all = compared(&["--depth", "2"]);
    for workload in ["c", "a"] {
        let lines: Vec<_> = all.iter().filter(|line| line["workload"] == workload).cloned().collect();
        let mut expected = BTreeSet::from(["farside udp", "farside tcp", "farside ring", "farside shm"]);
        expected.extend(cfg!(feature = "lmdb").then_some("lmdb"));
        expected.extend(["redis", "redis mget", "redis unix", "redis mget unix"].iter().filter(|_| redis));
        expected.extend(memcached.then_some("memcached"));
        let is_cross_checked = redis && workload == "c" && is_here("redis-benchmark");
        expected.extend(is_cross_checked.then_some("redis-benchmark"));
        assert_eq!(contenders(&lines), expected);
        for line in &lines {
            assert_eq!(
                line.as_object().expect("an object").len(),
                21,
                "scripts rely on these fields: {line}"
            );
            assert_eq!(line["rounds"], 2);
            assert_eq!(line["turn_seconds"], 0.01);
            assert_eq!(
                line["table_items"].as_u64(),
                line["records"].as_u64().map(|records| 2 * records),
                "{line}"
            );
            // A cache line takes less than a second from core to core; a single core has no distance.
            let distance = &line["distance_ns"];
            let [nearest, farthest] = ["min", "max"].map(|field| number(&distance[field]));
            assert_eq!(distance.is_null(), cores == 1, "{line}");
            assert!(cores == 1 || 0.0 < nearest && nearest <= farthest && farthest < 1e9, "{line}");
            assert!(line["machine"]["kernel"].as_str().is_some_and(|kernel| kernel.starts_with("Linux")));
            assert_eq!((&line["distribution"], &line["value_size"]), (&"uniform".into(), &512.into()));
            let rate = &line["ops_per_s"];
            let [min, median, max] = ["min", "median", "max"].map(|field| number(&rate[field]));
            assert!(0.0 < min && min <= median && median <= max, "{line}");
            let contender = line["contender"].as_str().expect("a name");
            if contender == "redis-benchmark" {
                assert_eq!(
                    (&line["is_cross_check"], &line["latency_us"]),
                    (&true.into(), &().into()),
                    "{line}"
                );
                continue;
            }
            let latency = &line["latency_us"];
            assert!(
                0.0 < number(&latency["p50"]) && latency["p50"].as_f64() <= latency["p99"].as_f64(),
                "{line}"
            );
            assert!(number(&line["cpu_s_per_mop"]["client"]) > 0.0, "{line}");
            let has_server = !matches!(contender, "lmdb" | "farside shm");
            assert_eq!(line["cores"].is_string(), has_server, "{line}");
            assert_eq!(line["cpu_s_per_mop"]["server"].is_number(), has_server, "{line}");
            let has_rival = redis || memcached;
            assert_eq!(number(&line["of_better_rival"]["median"]) > 0.0, has_rival, "{line}");
            let is_ours = matches!(contender, "lmdb") || contender.starts_with("farside");
            assert_eq!(line["batches"].is_null(), is_ours, "{line}");
        }
        let depths: BTreeSet<u64> = lines.iter().filter_map(|line| line["depth"].as_u64()).collect();
        assert_eq!(depths, BTreeSet::from([1, 2]));
    }
    let workloads: BTreeSet<_> = all.iter().filter_map(|line| line["workload"].as_str()).collect();
    assert_eq!(workloads, BTreeSet::from(["a", "c"]));
}

#[test]
fn text_output_names_each_setup_and_the_skipped_rivals() {
    if !cfg!(feature = "lmdb") {
        return println!("without LMDB there is no rival to compare with");
    }
    // No PATH at all: no server is found, and none was requested.
    let reported =
        farside(TINY.iter().chain(&["--workload", "c", "--fabrics", "shm,ring", "--threads", "2"])).done();
    let each = "by each of 2 client threads";
    for line in [
        &*format!("One operation at a time {each};"),
        &format!("64 operations in flight {each};"),
        "no server",
        "lmdb",
    ] {
        assert!(reported.text().contains(line), "{line}: {}", reported.text());
    }
    for name in ["redis-server", "memcached"] {
        let left_out =
            format!("{name} is not on PATH: install it, for example with 'apt-get install {name}'; skipped");
        assert!(reported.err.contains(&left_out), "{}", reported.err);
    }
    assert!(reported.err.contains("uniform over 2000 records"), "{}", reported.err);
}

#[test]
fn invalid_comparisons_are_refused_with_a_remedy() {
    let wrong: [(&[&str], &str); 17] = [
        (&["--rivals", "redis"], "apt-get install redis-server', or omit it from --rivals"),
        (&["--rivals", "lmdb,memcached"], "apt-get install memcached', or omit it from --rivals"),
        (&["--rivals", "dragonfly"], "redis, memcached, lmdb"),
        (&["--rivals", ""], "redis, memcached, lmdb"),
        (&["--fabrics", "frob"], "udp"),
        (&["--fabrics", "local"], "name udp, tcp, ring or shm"),
        (&["--depth", "65"], "1..=64"),
        (&["--depth", "0"], "1..=64"),
        (&["--threads", "0"], "1..=64"),
        (&["--value-size", "60001"], "give at most 60000"),
        (&["--value-size", "0"], "give 1 to 16777216 bytes"),
        (&["--records", "200000000", "--value-size", "60000"], "fewer --records"),
        (&["--distribution", "frob"], "name one of uniform"),
        (&["--seconds", "0"], "give 0.01 to"),
        (&["--seconds", "-1"], "give 0.01 to"),
        (&["--rounds", "-3"], "1.."),
        (&["--items", "999999"], "give at least 1000000"),
    ];
    for (arguments, remedy) in wrong {
        farside(["bench", "compare"].iter().chain(arguments)).refused(remedy);
    }
    let folder = tempfile::tempdir().expect("a folder");
    let inserts = folder.path().join("inserts");
    std::fs::write(&inserts, "readproportion=0.9\ninsertproportion=0.1\n").expect("written");
    // It is refused before the first workload is measured.
    farside(["bench", "compare", "--workload", "c", "--workload", &inserts.display().to_string()])
        .refused("choose a, b, c or f");
}

/// Writes a shell script as the program `name`.
fn script(folder: &Path, name: &str, text: &str) {
    let program = folder.join(name);
    std::fs::write(&program, format!("#!/bin/sh\n{text}\n")).expect("written");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("ours");
}

#[test]
fn a_server_that_fails_to_start_is_reported_with_its_output() {
    let folder = tempfile::tempdir().expect("a folder");
    let reported = |text: &str, reason: &str| {
        script(folder.path(), "redis-server", text);
        let mut command = command();
        command.env("PATH", folder.path()).args(TINY).args(["--rivals", "redis", "--fabrics", "shm"]);
        run(command, b"").refused(reason)
    };
    reported("exit 0", "prints no release");
    let version = "[ \"$1\" = --version ] && echo 'Redis server v=9.9.9' && exit 0\n";
    let ended = reported(&format!("{version}echo it is broken; exit 3"), "its last output: it is broken");
    assert!(
        ended.err.contains("exit status: 3") && ended.err.contains("or omit redis-server"),
        "{}",
        ended.err
    );
}

/// Returns the name and the parent's id of a process, if the process is alive.
fn about(pid: Pid) -> Option<(String, i32)> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    let (before, after) = stat.rsplit_once(')')?;
    let mut fields = after.split_whitespace();
    let is_alive = fields.next()? != "Z"; // A zombie: it has ended, and its parent has not waited for it.
    let parent = fields.next()?.parse().ok()?;
    is_alive.then_some((before.split_once('(')?.1.to_owned(), parent))
}

/// Returns the name and the id of each child process of `of`.
fn children(of: u32) -> Vec<(String, Pid)> {
    let entries = std::fs::read_dir("/proc").expect("/proc is mounted").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter_map(Pid::from_raw);
    let all = pids.filter_map(|pid| about(pid).map(|(name, parent)| (name, pid, parent)));
    all.filter(|(.., parent)| *parent == of as i32).map(|(name, pid, _)| (name, pid)).collect()
}

/// Starts a comparison and waits until it measures; returns the comparison and the folder of its servers.
fn start_comparison(folder: &Path) -> (Process, std::path::PathBuf) {
    let mut command = command();
    command.env("PATH", path()).env("TMPDIR", folder);
    command.args(["bench", "compare", "--records", "2000", "--rounds", "1000", "--fabrics", "shm,udp"]);
    let process = Process::start(command, folder.join("log"));
    until("it measures", || process.log().contains("measuring in turn"));
    let files = std::fs::read_dir(folder).expect("a folder").flatten().map(|entry| entry.path());
    let is_its = |path: &std::path::PathBuf| path.to_string_lossy().contains("farside-compare-");
    let place = files.into_iter().find(is_its).expect("the comparison has its own folder");
    assert!(place.is_dir());
    (process, place)
}

#[test]
fn servers_end_with_the_comparison_however_that_ends() {
    for signal in [Signal::TERM, Signal::INT, Signal::KILL] {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut process, place) = start_comparison(folder.path());
        let servers = children(process.pid());
        for (name, is_expected) in [
            ("farside", true),
            ("redis-server", is_here("redis-server")),
            ("memcached", is_here("memcached")),
        ] {
            assert_eq!(servers.iter().any(|(its, _)| its == name), is_expected, "{name}: {servers:?}");
        }
        process.signal(signal);
        assert_eq!(process.ended(), None, "the signal ends it");
        until("its servers have ended", || servers.iter().all(|(_, pid)| about(*pid).is_none()));
        if signal != Signal::KILL {
            assert!(!place.exists(), "its folder is gone");
        }
    }
}

#[test]
fn a_dead_rival_ends_the_comparison_with_an_error() {
    if !is_here("redis-server") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (mut process, place) = start_comparison(folder.path());
    let servers = children(process.pid());
    let (_, redis) = servers.iter().find(|(name, _)| name == "redis-server").expect("redis-server runs");
    kill_process(*redis, Signal::KILL).expect("redis-server is alive");
    let since = std::time::Instant::now();
    assert_eq!(process.ended(), Some(2));
    assert!(since.elapsed() < PATIENCE && process.log().contains("redis"), "{}", process.log());
    assert!(!place.exists(), "its folder is gone");
}

#[test]
fn transactions_are_compared_with_those_of_redis() {
    let mut compare = command();
    compare.env("PATH", path()).args(["bench", "compare-txn", "--records", "200", "--rounds", "2"]);
    compare.args(["--seconds", "0.05", "--fabrics", "udp,shm", "--tasks", "4", "--json"]);
    if !is_here("redis-server") {
        run(compare, b"").refused("redis-server is not on PATH: install it");
        return;
    }
    let compared = run(compare, b"").done();
    let lines: Vec<serde_json::Value> =
        compared.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 3, "{}", compared.text());
    assert!(lines[0]["contender"].as_str().is_some_and(|name| name.starts_with("redis ")), "{}", lines[0]);
    assert_eq!(
        (&lines[1]["contender"], &lines[2]["contender"]),
        (&"farside udp".into(), &"farside shm".into())
    );
    for line in &lines {
        assert!(number(&line["ops_per_s"]["min"]) > 0.0, "{line}");
        assert!((0.0..1.0).contains(&number(&line["abort_rate"])), "{line}");
    }
    assert_eq!(number(&lines[0]["times_redis"]["max"]), 1.0);

    farside(["bench", "compare-txn", "--fabrics", "local"]).refused("without a server to compare");
    farside(["bench", "compare-txn", "--keys", "5"]).refused("--keys");
    farside(["bench", "compare-txn", "--value-size", "7"]).refused("give a multiple of 8");
    let mut without = command();
    without.env("PATH", "/nowhere").args(["bench", "compare-txn"]);
    run(without, b"").refused("redis-server is not on PATH: install it");
}
