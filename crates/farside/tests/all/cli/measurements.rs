//! `bench ycsb` and `bench floor`: their JSON for scripts, their refusals, and their cleanup.

use crate::support::{Node, Process, command, farside, serve, until};
use rustix::process::Signal;
use serde_json::Value;

/// A measurement whose rate does not matter.
const SHORT: [&str; 4] = ["--warm-up", "10ms", "--seconds", "0.2"];
/// A measurement that needs a hundred operations, some intervals, or the usual warm-up.
const USUAL: [&str; 2] = ["--seconds", "0.3"];

#[track_caller]
fn ycsb(arguments: &[&str]) -> serde_json::Value {
    ycsb_for(&SHORT, arguments)
}

#[track_caller]
fn ycsb_for(time: &[&str], arguments: &[&str]) -> serde_json::Value {
    let common = ["bench", "ycsb", "--records", "1000", "--json"];
    let report = farside(common.iter().chain(time).chain(arguments)).done().json();
    let named = arguments.iter().position(|of| *of == "--system");
    let system = named.map_or("prism-kv", |at| arguments[at + 1]);
    assert_eq!(report["system"], system);
    let positive = ["load_factor", "mean_probes", "page_size", "ops_per_s"];
    let number = |value: &serde_json::Value| value.as_f64().unwrap_or(-1.0);
    for field in positive {
        assert!(number(&report[field]) > 0.0, "{field}: {report}");
    }
    let latency = &report["latency_us"];
    let [p50, p99, p999] = ["p50", "p99", "p999"].map(|field| number(&latency[field]));
    assert!(0.0 < p50 && p50 <= p99 && p99 <= p999, "{latency}");
    for field in ["round_trips", "requests", "bytes_out", "bytes_in"] {
        assert!(number(&report["per_op"][field]) > 0.0, "{field}: {report}");
    }
    assert!(number(&report["per_op"]["atomics"]) >= 0.0, "{report}");
    assert!(number(&report["cpu_s_per_mop"]["client"]) > 0.0, "{report}");
    assert!(report["cpu_s_per_mop"].as_object().expect("an object").contains_key("node"), "{report}");
    assert_eq!((&report["errors"], &report["violations"]), (&0.into(), &0.into()));
    let fields: Vec<&str> = report.as_object().expect("an object").keys().map(String::as_str).collect();
    let counted = usize::from(!report["index"].is_null());
    assert_eq!(fields.len(), 23 + counted, "scripts rely on these fields: {fields:?}");
    report
}

/// Returns the name of each kind of operations in a report, and the number of these operations.
fn operations(report: &serde_json::Value) -> Vec<(String, u64)> {
    let operations = report["operations"].as_object().expect("an object");
    operations.iter().map(|(name, done)| (name.clone(), done["count"].as_u64().expect("a count"))).collect()
}

#[test]
fn bench_ycsb_runs_every_ycsb_workload_without_scans() {
    for (workload, expected) in [
        ("a", &["read", "update"][..]),
        ("b", &["read", "update"]),
        ("c", &["read"]),
        ("d", &["insert", "read"]),
        ("f", &["read", "read-modify-write"]),
    ] {
        let report = ycsb(&["--fabric", "local", "--workload", workload, "--verify"]);
        let names: Vec<String> = operations(&report).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, expected, "{report}");
        assert_eq!((&report["verified"], &report["records"]), (&true.into(), &1000.into()));
    }
}

#[test]
fn bench_ycsb_stops_after_operations_and_repeats() {
    let flags = ["bench", "ycsb", "--fabric", "local", "--threads", "2", "--operations", "1001"];
    let report =
        farside(flags.iter().chain(&["--records", "1000", "--repeats", "3", "--json"])).done().json();
    assert_eq!(operations(&report), [("read".to_owned(), 3003)], "{report}");
    let rates: Vec<f64> = report["repeats_ops_per_s"]
        .as_array()
        .expect("an array")
        .iter()
        .flat_map(|rate| rate.as_f64())
        .collect();
    let mut sorted = rates.clone();
    sorted.sort_by(f64::total_cmp);
    assert_eq!((rates.len(), report["ops_per_s"].as_f64()), (3, Some(sorted[1])), "the median: {report}");
    let people = farside(flags.iter().chain(&["--records", "1000", "--repeats", "2"])).done();
    assert!(people.text().contains("ops/s is the median of 2 repeats, from "), "{}", people.text());
}

/// An open loop keeps its schedule. A latency starts when the operation is due, so it includes the time that the
/// operation waits for a free task.
#[test]
fn an_open_loop_keeps_its_schedule_and_counts_waiting_time() {
    // The tasks can do four times the target, so they catch up after other programs have delayed them.
    let kept =
        ycsb_for(&USUAL, &["--fabric", "local", "--target", "2000", "--tasks", "16", "--delay", "1ms"]);
    let rate = kept["ops_per_s"].as_f64().expect("a rate");
    assert!((rate / 2000.0 - 1.0).abs() < 0.5, "{kept}");
    assert_eq!(kept["target_ops_per_s"], 2000.0);
    // One task needs 2 ms for each operation, and one is due every 0.2 ms: each starts later than the one before.
    let late = ycsb_for(&USUAL, &["--fabric", "local", "--target", "5000", "--tasks", "1", "--delay", "1ms"]);
    let read = &late["operations"]["read"];
    let [due, begun] = ["latency_us", "service_us"].map(|of| read[of]["p50"].as_f64().expect("a latency"));
    assert!(due > 10.0 * begun && begun >= 2000.0, "{late}");
    // No store reaches this rate: a warm-up that waited for its operations would not end, and the store would be too
    // small for its inserts.
    ycsb_for(&USUAL, &["--fabric", "local", "--workload", "d", "--target", "1e9"]);
    farside(["bench", "ycsb", "--target", "0"]).refused("is not a number of operations a second");
    farside(["bench", "ycsb", "--target", "5", "--idle-ms", "5"]).refused("cannot be used with");
}

#[test]
fn bench_ycsb_reads_property_files_and_property_flags() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mine");
    let text = "recordcount=500\noperationcount=700\nreadproportion=1\nupdateproportion=0\nfieldcount=2\n\
                fieldlength=50\nrequestdistribution=uniform\ntable=usertable\n";
    std::fs::write(&path, text).expect("written");
    let path = path.to_str().expect("UTF-8");
    let run =
        farside(["bench", "ycsb", "--fabric", "local", "-P", path, "-p", "recordcount=600", "--json"]).done();
    assert!(run.err.contains(":8: property 'table' has no effect"), "{}", run.err);
    let report = run.json();
    assert_eq!((&report["records"], &report["value_size"]), (&600.into(), &100.into()));
    assert_eq!((&report["distribution"], operations(&report)[0].1), (&"uniform".into(), 700));
    let beside = |property| ["bench", "ycsb", "-p", property];
    farside(beside("recordcuont=5")).refused("the property 'recordcuont' has no effect here");
    farside(beside("recordcount")).refused("write it like readproportion=0.95");
    farside(beside("readproportion=95")).refused("legal is a number from 0 to 1");
    farside(beside("fieldlength=99999999")).refused("or give --value-size");
    farside(["bench", "ycsb", "--workload", "e"]).refused("workload e has scans");
    farside(["bench", "ycsb", "--workload", "g"]).refused("built in are a, b, c, d, e and f");
}

#[test]
fn bench_ycsb_prints_the_output_of_ycsb() {
    let flags = ["bench", "ycsb", "--fabric", "local", "--records", "1000", "--workload", "a", "--ycsb"];
    let text = farside(flags.iter().chain(&["--operations", "2000", "--sample-every", "1"])).done();
    for line in [
        "[OVERALL], RunTime(ms), ",
        "[OVERALL], Throughput(ops/sec), ",
        "[INSERT], Return=OK, 1000",
        "[READ], AverageLatency(us), ",
        "[UPDATE], 99thPercentileLatency(us), ",
        "[READ], Return=OK, ",
    ] {
        assert!(text.text().contains(line), "{line} is missing: {}", text.text());
    }
    assert!(text.text().lines().all(|line| line.split(", ").count() == 3), "{}", text.text());
}

#[test]
fn bench_ycsb_writes_an_hdr_histogram_interval_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("latencies.hlog");
    let path = path.to_str().expect("UTF-8");
    let log = ["--hdr-log", path, "--interval", "100ms"];
    ycsb_for(&USUAL, &[&["--fabric", "local", "--workload", "a"][..], &log].concat());
    let text = std::fs::read_to_string(path).expect("it was written");
    assert!(text.starts_with("#") && text.contains("[Histogram log format version 1.3]"), "{text}");
    let lines = |tag: &str| text.lines().filter(|line| line.starts_with(&format!("Tag={tag},"))).count();
    assert!(lines("read") >= 2 && lines("update") >= 2, "{text}");
    let nowhere = ["bench", "ycsb", "--records", "1000", "--hdr-log", "/nowhere/log"];
    farside(nowhere).refused("cannot write '/nowhere/log'");
    farside(["bench", "ycsb", "--hdr-log", path, "--interval", "0s"]).refused("too short for an interval");
    farside(["bench", "ycsb", "--interval", "2s"]).refused("--hdr-log <FILE>");
}

#[test]
fn the_two_phases_can_be_two_commands() {
    let node = Node::with(&["--memory", "256MiB"]);
    let url = node.url();
    let more_records =
        ["bench", "ycsb", "--pool", &*url, "--store", "mine", "--phase", "run", "--records", "1001"];
    let phase = |phase, more: &[&str]| {
        let flags =
            ["bench", "ycsb", "--records", "1000", "--seconds", "0.2", "--pool", &url, "--store", "mine"];
        farside(flags.iter().chain(&["--phase", phase]).chain(more))
    };
    phase("run", &[]).refused("store 'mine' does not exist: load it first");
    let loaded = phase("load", &["--json"]).done().json();
    assert_eq!(loaded["records"], 1000, "{loaded}");
    assert!(node.run(["store", "list"]).done().text().starts_with("mine"));
    phase("load", &[]).refused("mine");
    let ran = phase("run", &["--json"]).done().json();
    assert_eq!((&ran["load"], &ran["errors"], &ran["violations"]), (&().into(), &0.into(), &0.into()));
    assert!(node.run(["store", "list"]).done().text().starts_with("mine"), "the store still exists");
    phase("run", &["--verify"]).refused("needs the records that this run loads");
    phase("run", &["--items", "5000"]).refused("farside store rebuild");
    phase("load", &["--items", "999"]).refused("give at least 1000");
    phase("run", &["--system", "pilaf"]).refused("is a prism-kv, not a pilaf: give --system prism-kv");
    farside(more_records).refused("has no record 1000: it was loaded with fewer --records");
    phase("run", &["--value-size", "100"]).refused("give --value-size 512");
    node.run(["store", "drop", "mine"]).done();
    assert!(phase("load", &["--ycsb"]).done().text().contains("[INSERT], Operations, 1000"));
    farside(["bench", "ycsb", "--phase", "load"]).refused("--pool <URL>");
}

#[test]
fn bench_ycsb_measures_local() {
    let a = ycsb(&["--fabric", "local", "--workload", "a", "--verify", "--slot-cache", "1000"]);
    assert_eq!(
        (&a["fabric"], &a["workload"], &a["distribution"]),
        (&"local".into(), &"a".into(), &"zipfian".into())
    );
    assert!(a["cpu_s_per_mop"]["node"].is_null(), "the node is in the client's process");
    assert!(a["per_op"]["atomics"].as_f64() > Some(0.3), "half of workload a are puts: {a}");
    let c = ycsb(&["--fabric", "local", "--workload", "c", "--collision-free", "--distribution", "uniform"]);
    assert_eq!((&c["workload"], &c["distribution"]), (&"c".into(), &"uniform".into()));
    assert_eq!((&c["per_op"]["round_trips"], &c["mean_probes"]), (&1.0.into(), &1.0.into()));
    assert_eq!(c["per_op"]["atomics"], 0.0, "workload c only reads");
    let roomy = ycsb(&["--fabric", "local", "--items", "8000"]);
    assert_eq!(roomy["load_factor"], 1000.0 / 32768.0, "{roomy}");
}

#[test]
fn bench_ycsb_measures_shm() {
    let a = ycsb(&["--fabric", "shm", "--workload", "a", "--threads", "2", "--verify"]);
    assert_eq!((&a["fabric"], &a["workload"]), (&"shm".into(), &"a".into()));
    assert!(a["cpu_s_per_mop"]["node"].as_f64().is_some(), "{a}");
    let b = ycsb(&["--fabric", "shm", "--workload", "b", "--slot-cache", "100", "--tasks", "1"]);
    assert_eq!(b["workload"], "b");
    assert!(b["per_op"]["round_trips"].as_f64() >= Some(1.0), "{b}");
}

#[test]
fn bench_ycsb_measures_pilaf_beside_prism_kv() {
    for fabric in ["local", "shm", "udp", "tcp", "tls", "ring"] {
        let a = ycsb(&["--system", "pilaf", "--fabric", fabric, "--workload", "a", "--verify"]);
        assert_eq!((&a["fabric"], &a["workload"]), (&fabric.into(), &"a".into()));
        assert_eq!(a["per_op"]["atomics"], 0.0, "the node's CPU does the puts: {a}");
    }
    let c = ["--system", "pilaf", "--fabric", "local", "--collision-free", "--workload", "c"];
    let c = ycsb(&c);
    assert_eq!((&c["per_op"]["round_trips"], &c["per_op"]["requests"]), (&2.0.into(), &2.0.into()));
    assert_eq!(c["mean_probes"], 1.0);
    // Its table does not grow: its size includes the inserts of the sample and the warm-up.
    for more in [&["--warm-up", "0"][..], &[], &["--idle-ms", "10"]] {
        let d = [&["--system", "pilaf", "--fabric", "local", "--workload", "d", "--records", "100"], more]
            .concat();
        let d = farside(["bench", "ycsb", "--operations", "1000", "--json"].iter().chain(&d));
        let d = d.done().json();
        assert_eq!(operations(&d).iter().map(|(_, count)| count).sum::<u64>(), 1000, "{d}");
    }
    let long = ["bench", "ycsb", "--system", "pilaf", "--records", "10", "--value-size", "61440"];
    farside(long).refused("a value of Pilaf has at most");
}

#[test]
fn bench_ycsb_measures_the_rivals_whose_gets_are_one_read() {
    for system in ["farm-kv", "cached-index"] {
        for fabric in ["local", "shm", "udp", "tcp"] {
            let a = ycsb(&["--system", system, "--fabric", fabric, "--workload", "a", "--verify"]);
            assert_eq!((&a["system"], &a["fabric"]), (&system.into(), &fabric.into()));
            assert_eq!((&a["violations"], &a["errors"]), (&0.into(), &0.into()), "{a}");
            assert_eq!(a["per_op"]["atomics"], 0.0, "the node's CPU does the puts: {a}");
        }
        let long = ["bench", "ycsb", "--system", system, "--records", "10", "--value-size", "61440"];
        farside(long).refused("a value of");
    }
    let c = |system: &str| {
        ycsb(&[
            "--system",
            system,
            "--fabric",
            "local",
            "--collision-free",
            "--workload",
            "c",
            "--tasks",
            "1",
        ])
    };
    let farm = c("farm-kv");
    assert_eq!((&farm["per_op"]["round_trips"], &farm["per_op"]["requests"]), (&1.0.into(), &1.0.into()));
    assert!(farm["per_op"]["bytes_in"].as_f64() > Some(8.0 * 512.0), "a READ returns 8 slots: {farm}");
    assert!(farm["index"].is_null(), "{farm}");
    let cached = c("cached-index");
    let trips = cached["per_op"]["round_trips"].as_f64().expect("a number");
    assert!((1.0..2.0).contains(&trips), "most entries are cached: {cached}");
    let counts = &cached["index"];
    let [bytes, hits, misses] =
        ["cache_bytes", "cache_hits", "cache_misses"].map(|name| counts[name].as_u64().expect("a count"));
    assert!(bytes > 0 && hits > misses, "{cached}");
    assert_eq!(counts["stale_entries"], 0, "{cached}");
}

#[test]
fn bench_ycsb_delays_every_round_trip() {
    let far = ycsb(&["--fabric", "local", "--workload", "c", "--tasks", "1", "--delay", "1ms"]);
    // No read takes less than a round trip.
    assert!(far["latency_us"]["p50"].as_f64() >= Some(2000.0), "{far}");
}

#[test]
fn bench_ycsb_reports_the_injected_faults() {
    let common = ["bench", "ycsb", "--records", "1000", "--seconds", "0.5", "--workload", "a", "--verify"];
    let faulty = |more: &[&str]| farside(common.iter().chain(more));
    let lossy = "loss=0.02,duplicate=0.02,reorder=0.02,wait=100us..1ms,seed=7";
    let udp = faulty(&["--fabric", "udp", "--fault", lossy]).done();
    assert!(udp.err.contains("faults: of ") && !udp.err.contains(" 0 lost, 0 doubled"), "{}", udp.err);
    for fabric in ["tcp", "tls"] {
        let late = faulty(&["--fabric", fabric, "--fault", "delay=0.02"]).done();
        assert!(late.err.contains("faults: of ") && !late.err.contains(" 0 late"), "{}", late.err);
    }
    faulty(&["--fabric", "tcp", "--fault", "loss=0.02"]).refused("ask for delay and reset alone, or use udp");
    faulty(&["--fabric", "local", "--fault", "loss=0.02"]).refused("use udp:// or tcp://");
}

#[test]
fn bench_ycsb_on_a_named_node_leaves_nothing_behind() {
    let node = Node::with(&["--memory", "256MiB"]);
    let before = node.run(["info", "--json"]).done().json()["unassigned_bytes"].clone();
    let c = ycsb(&["--workload", "c", "--pool", &node.url()]);
    assert_eq!((&c["fabric"], &c["workload"]), (&"shm".into(), &"c".into()));
    assert!(node.run(["store", "list"]).done().out.is_empty());
    assert_eq!(node.run(["info", "--json"]).done().json()["unassigned_bytes"], before);
    until("all sessions are closed", || node.sessions() == 0);
    let people =
        farside(["bench", "ycsb", "--records", "1000", "--seconds", "0.1", "--pool", &node.url()]).done();
    assert!(people.text().contains("ops/s") && people.text().lines().count() >= 2, "{}", people.text());
    let small = Node::with(&["--memory", "16MiB"]);
    farside(["bench", "ycsb", "--records", "1000", "--pool", &small.url()]).refused("omit --pool");
}

#[test]
fn bench_ycsb_reports_the_fabric_of_a_named_node() {
    let node = Node::with(&["--memory", "256MiB", "--listen", "tcp://127.0.0.1:0"]);
    let url = node.listening();
    assert_eq!(ycsb(&["--pool", &url])["fabric"], "tcp");
    assert_eq!(ycsb(&["--pool", &url, "--fabric", "tcp"])["fabric"], "tcp");
}

#[test]
fn slow_operations_do_not_prolong_a_measurement_much() {
    let began = std::time::Instant::now();
    ycsb_for(&USUAL, &["--fabric", "udp", "--delay", "100ms"]);
    assert!(
        began.elapsed().as_secs() < 60,
        "{:?}: a warm-up stops before 1000 slow operations",
        began.elapsed()
    );
    let idle = ["bench", "ycsb", "--records", "1000", "--seconds", "0.1", "--idle-ms", "1500"];
    farside([&idle[..], &["--tasks", "1"]].concat()).refused("give more --seconds");
}

#[test]
fn a_measurement_ends_when_its_node_does() {
    let node = Node::with(&["--memory", "256MiB", "--listen", "tcp://127.0.0.1:0"]);
    let mut command = command();
    command.args(["bench", "ycsb", "--records", "1000", "--seconds", "600", "--pool", &node.listening()]);
    let mut bench = Process::start(command, node.folder().join("bench"));
    // Loading takes a few thousand chains. The session that measures opens after it.
    let chains = || node.run(["info", "--json"]).done().json()["traffic"]["chains"].as_u64();
    until("it measures", || chains() > Some(10_000));
    node.process.signal(Signal::KILL);
    assert_eq!(bench.ended(), Some(2), "failed operations are an error");
    assert!(bench.log().contains("is closed"), "{}", bench.log());
}

#[test]
fn the_largest_values_do_not_prolong_a_measurement() {
    let ran =
        farside(["bench", "ycsb", "--records", "1", "--value-size", "16MiB", "--seconds", "0.1"]).done();
    assert!(ran.err.contains("warming up"), "{}", ran.err);
}

#[test]
fn a_measurement_ended_by_a_signal_drops_its_store() {
    let node = Node::with(&["--memory", "256MiB"]);
    for signal in [Signal::INT, Signal::TERM] {
        let mut command = command();
        command.args(["bench", "ycsb", "--records", "1000", "--seconds", "600", "--pool", &node.url()]);
        let mut bench = Process::start(command, node.folder().join("bench"));
        until("it measures", || bench.log().contains("warming up"));
        assert!(node.run(["store", "list"]).done().text().starts_with("ycsb-"));
        bench.signal(signal);
        assert_eq!(bench.ended(), None, "a signal ended it");
        assert!(node.run(["store", "list"]).done().out.is_empty());
    }
    // If the node does not respond, the command that drops the store is printed.
    let mut command = command();
    command.args(["bench", "ycsb", "--records", "1000", "--seconds", "600", "--pool", &node.url()]);
    let mut bench = Process::start(command, node.folder().join("bench"));
    until("it measures", || bench.log().contains("warming up"));
    node.process.signal(Signal::STOP);
    let stat = format!("/proc/{}/stat", node.process.pid());
    until("the node is stopped", || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T ")));
    bench.signal(Signal::INT);
    assert_eq!(bench.ended(), None, "a signal ended it");
    node.process.signal(Signal::CONT);
    let store =
        node.run(["store", "list", "--json"]).done().json()["name"].as_str().expect("a name").to_owned();
    let remedy = format!("farside store drop {store} --pool {}", node.url());
    assert!(bench.log().contains(&remedy), "{}", bench.log());
}

#[test]
fn bench_floor_measures_accesses_to_memory() {
    for (fabric, tasks) in [("local", 1), ("shm", 16)] {
        for workload in ["a", "c"] {
            let tasks_flag = tasks.to_string();
            let arguments =
                ["bench", "floor", "--records", "1000", "--seconds", "0.1", "--json", "--fabric", fabric];
            // Workload c is the default.
            let chosen = ["--workload", workload].into_iter().filter(|_| workload != "c");
            let arguments = arguments.into_iter().chain(["--tasks", &tasks_flag]).chain(chosen);
            let report = farside(arguments).done().json();
            assert_eq!((&report["fabric"], &report["tasks"]), (&fabric.into(), &tasks.into()));
            assert_eq!(report["workload"], workload);
            for field in ["page_size", "rtt_us_p50", "ops_per_s"] {
                assert!(report[field].as_f64() > Some(0.0), "{field}: {report}");
            }
            let fields = report.as_object().expect("an object").len();
            assert_eq!(fields, 6, "scripts rely on these fields: {report}");
        }
    }
}

#[test]
fn bench_floor_measures_messages_and_cpu_time_of_both_sides() {
    let short = ["--seconds", "0.3"];
    let mixed = ["--seconds", "0.3", "--workload", "a"];
    let idle = ["--blocking", "--idle-ms", "1", "--rounds", "300"];
    for fabric in ["ring", "udp", "tcp"] {
        for (tasks, flags) in [
            (1, &short[..]),
            (16, &[&short[..], &["--bare"]].concat()),
            (1, &mixed),
            (16, &mixed),
            (16, &[&mixed[..], &["--bare"]].concat()),
            (4, &idle),
        ] {
            let tasks_flag = tasks.to_string();
            let arguments = ["bench", "floor", "--records", "1000", "--json", "--fabric", fabric, "--tasks"];
            let arguments = arguments.into_iter().chain([&*tasks_flag]).chain(flags.iter().copied());
            let report = farside(arguments).done().json();
            assert_eq!((&report["fabric"], &report["tasks"]), (&fabric.into(), &tasks.into()));
            assert_eq!(report["workload"], if flags.contains(&"a") { "a" } else { "c" });
            for field in ["page_size", "rtt_us_p50", "ops_per_s"] {
                assert!(report[field].as_f64() > Some(0.0), "{field}: {report}");
            }
            let cpu = report["cpu_s_per_mop"].as_object().expect("an object");
            assert!(cpu["client"].as_f64() > Some(0.0) && cpu["server"].as_f64() >= Some(0.0), "{report}");
            assert_eq!((report.as_object().expect("an object").len(), cpu.len()), (7, 2), "{report}");
        }
    }
}

#[test]
fn a_benchmark_by_nodes_tells_what_the_death_of_one_costs_the_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = |number: u32| folder.path().join(format!("{number}.sock"));
    let start = |number: u32| {
        let log = folder.path().join(format!("log-{number}"));
        let node = serve(&socket(number), &["--memory", "128MiB"], log);
        node.line();
        node
    };
    let mut nodes: Vec<Process> = (0..3).map(start).collect();
    let urls = [0, 1, 2].map(|number| format!("shm:{}", socket(number).display()));
    let pool = urls.join(",");
    let common = ["bench", "ycsb", "--records", "1000", "--pool", &pool, "--by-node"];
    let with = |more: &[&str]| farside(common.iter().chain(more));
    with(&["--tasks", "2"]).refused("needs a task for each of the 3 nodes");
    with(&["--workload", "d"]).refused("whose keys lie on any node");
    let text = with(&["--seconds", "0.2", "--workload", "a", "--verify"]).done();
    assert!(text.text().contains(&format!("{}: ", urls[2])), "{}", text.text());

    let mut command = command();
    command.args(common).args(["--seconds", "0.5", "--repeats", "3", "--warm-up", "100ms", "--json"]);
    let mut bench = Process::start(command, folder.path().join("bench log"));
    until("the measurement begins", || bench.log().contains("measuring"));
    std::thread::sleep(std::time::Duration::from_millis(600)); // Less than the first repeat, more than its sample.
    nodes[1].kill();
    let report: serde_json::Value = serde_json::from_str(&bench.line()).expect("JSON");
    assert_eq!(bench.ended(), Some(2), "operations have failed");
    let shown = report["nodes"].as_array().expect("an entry for each node");
    for (node, url) in shown.iter().zip(&urls) {
        assert_eq!(node["url"], url.as_str());
        assert_eq!(node["errors"] == 0, *url != urls[1], "only the dead node's operations fail: {report}");
        let rates = node["repeats_ops_per_s"].as_array().expect("rates");
        let last = rates.last().and_then(serde_json::Value::as_f64).expect("a rate");
        assert_eq!((rates.len(), last > 0.0), (3, *url != urls[1]), "the others go on: {report}");
    }
    assert_eq!(shown.len(), 3);
}

#[test]
fn bench_latch_reports_as_ycsb_does_and_checks_all_objects() {
    for (scheme, fabric, reads, trips) in [
        ("basic", "local", "0.5", 3.5),
        ("async-rw", "local", "0", 2.0),
        ("unlatch", "tcp", "0.5", 2.0),
        ("v2-footer", "local", "1", 3.0),
        ("crc", "shm", "0.5", 2.0),
    ] {
        let flags = ["--scheme", scheme, "--fabric", fabric, "--reads", reads, "--objects", "100", "--json"];
        let flags = flags.into_iter().chain(["--operations", "400", "--workers", "8", "--threads", "2"]);
        let flags = flags.chain(["--zipf", "1.5", "--padding", "8", "--size", "104", "--warm-up", "10ms"]);
        let report = farside(["bench", "latch"].into_iter().chain(flags)).done().json();
        assert_eq!((&report["system"], &report["scheme"]), (&"latch".into(), &scheme.into()));
        assert_eq!((&report["fabric"], &report["distribution"]), (&fabric.into(), &"zipfian:1.5".into()));
        assert_eq!((&report["threads"], &report["tasks"]), (&2.into(), &4.into()));
        assert_eq!((&report["records"], &report["read_back"]), (&100.into(), &100.into()));
        assert_eq!((&report["errors"], &report["violations"]), (&0.into(), &0.into()), "{scheme}");
        let count = |kind: &str| report["operations"][kind]["count"].as_u64().unwrap_or(0);
        assert_eq!(count("read") + count("update"), 400, "{report}");
        assert_eq!((count("update") == 0, count("read") == 0), (reads == "1", reads == "0"), "{report}");
        if fabric == "local" {
            // A sample of operations of one client, without contention.
            let found = report["per_op"]["round_trips"].as_f64().expect("a number");
            assert!((found - trips).abs() < 0.1, "{scheme}: {found} instead of {trips}");
        }
    }
    let small = ["--objects", "100", "--operations", "100", "--warm-up", "10ms"];
    for fabric in ["local", "shm", "tcp"] {
        let flags = ["--scheme", "versions", "--fabric", fabric].into_iter().chain(small);
        farside(["bench", "latch"].into_iter().chain(flags)).refused("create the store with the scheme crc");
    }
    for (flags, remedy) in [
        (["--scheme", "naive"], "v2-footer"),
        (["--reads", "2"], "give 0 to 1"),
        (["--zipf", "11"], "give 0, or 0.001 to 10"),
        (["--padding", "4"], "give 0 or 8"),
        (["--size", "12"], "give a multiple of 8, at most 32KiB"),
        (["--size", "64KiB"], "give a multiple of 8, at most 32KiB"),
    ] {
        farside(["bench", "latch"].into_iter().chain(flags)).refused(remedy);
    }
    farside(["bench", "latch", "--workers", "65"]).refused("give --threads 2 for 65 workers");
    farside(["bench", "latch", "--workers", "7", "--threads", "2"]).refused("give --workers 8");
}

#[test]
fn bench_rpc_sends_each_request_and_checks_each_response() {
    for (fabric, nodes, batch, request, response) in [
        ("local", 1, 1, 8, 8),
        ("shm", 3, 4, 9, 4032),
        ("udp", 2, 16, 64, 32),
        ("ring", 1, 16, 8, 100),
        ("tcp", 8, 2, 4032, 8),
    ] {
        let numbers = [nodes, batch, request, response].map(|number: u64| number.to_string());
        let names = ["--nodes", "--batch", "--request", "--response"];
        let flags = names.into_iter().zip(&numbers).flat_map(|(name, number)| [name, number]);
        let flags = flags.chain(["--fabric", fabric, "--operations", "300", "--seconds", "20", "--json"]);
        let flags = flags.chain(["--warm-up", "10ms", "--tasks", "4"]);
        let report = farside(["bench", "rpc"].into_iter().chain(flags)).done().json();
        assert_eq!((&report["system"], &report["fabric"]), (&"rpc-echo".into(), &fabric.into()));
        assert_eq!((&report["errors"], &report["violations"]), (&0.into(), &0.into()), "{report}");
        assert_eq!(report["operations"]["batch"]["count"], 300);
        let (calls, per_op) = (&report["calls"], &report["per_op"]);
        let told = ["nodes", "batch", "request_bytes", "response_bytes"].map(|name| calls[name].as_u64());
        assert_eq!(told, [nodes, batch, request, response].map(Some));
        // One packet for each node that a batch has requests for.
        let packets = per_op["requests"].as_f64().expect("a number");
        assert!(packets >= 1.0 && packets <= nodes.min(batch) as f64, "{report}");
        assert!(per_op["bytes_out"].as_f64() > Some((batch * request) as f64), "{report}");
        assert!(per_op["bytes_in"].as_f64() > Some((batch * response) as f64), "{report}");
        let has_floor = nodes == 1 && fabric == "ring";
        assert_eq!(calls["floor"]["ops_per_s"].as_f64().is_some(), has_floor, "{report}");
    }
    for (flags, remedy) in [
        (["--request", "7"], "give 8 to 4032"),
        (["--response", "4033"], "give 8 to 4032"),
        (["--batch", "17"], "1..=16"),
        (["--nodes", "9"], "1..=8"),
    ] {
        farside(["bench", "rpc"].into_iter().chain(flags)).refused(remedy);
    }
    let long = ["--response", "4032", "--batch", "16"];
    farside(["bench", "rpc"].into_iter().chain(long)).refused("give at most --batch 15");
}

#[test]
fn bench_latch_predicts_that_padding_spreads_latches_over_lock_slots() {
    let predicted = |scheme: &str, padding: &str| {
        let flags = ["--predict", "--scheme", scheme, "--padding", padding, "--reads", "0.5", "--json"];
        let flags = flags.into_iter().chain(["--size", "4088", "--objects", "2000", "--workers", "64"]);
        farside(["bench", "latch", "--operations", "2000"].into_iter().chain(flags)).done().json()
    };
    let rate = |report: &serde_json::Value| report["ops_per_s"].as_f64().expect("a number");
    // The latches of objects of 4096 bytes share one lock slot. Where they are spread, the link is the limit.
    let (one_slot, spread) = (predicted("basic", "0"), predicted("basic", "8"));
    assert!(rate(&spread) > 1.8 * rate(&one_slot), "{one_slot} {spread}");
    let report = predicted("versions", "0");
    assert_eq!((&report["scheme"], &report["fabric"]), (&"versions".into(), &"model".into()));
    assert_eq!((&report["tasks"], &report["records"]), (&64.into(), &2000.into()));
    farside(["bench", "latch", "--predict", "--fabric", "shm"]).refused("--predict");
}

#[track_caller]
fn ycsb_of_index(arguments: &[&str]) -> serde_json::Value {
    let common = ["bench", "ycsb", "--system", "smart", "--records", "2000", "--json"];
    let report = farside(common.iter().chain(&SHORT).chain(arguments)).done().json();
    assert_eq!((&report["errors"], &report["violations"]), (&0.into(), &0.into()), "{report}");
    assert_eq!((&report["system"], &report["load_factor"]), (&"smart".into(), &serde_json::Value::Null));
    let fields: Vec<&str> = report.as_object().expect("an object").keys().map(String::as_str).collect();
    assert_eq!(fields.len(), 25, "those of every system, 'keys' and 'index': {fields:?}");
    let counts = report["index"].as_object().expect("an object");
    assert!(counts["cache_hits"].as_u64() > Some(0) && counts.contains_key("writes_combined"), "{report}");
    report
}

#[test]
fn bench_ycsb_runs_every_workload_on_an_index() {
    for (workload, expected) in [
        ("a", &["read", "update"][..]),
        ("b", &["read", "update"]),
        ("c", &["read"]),
        ("d", &["insert", "read"]),
        ("e", &["insert", "scan"]),
        ("f", &["read", "read-modify-write"]),
    ] {
        for keys in ["numbers", "emails"] {
            let sizes = ["--value-size", "64", "--keys", keys];
            let report = ycsb_of_index(
                &[&["--fabric", "local", "--workload", workload, "--verify"][..], &sizes].concat(),
            );
            let names: Vec<String> = operations(&report).into_iter().map(|(name, _)| name).collect();
            assert_eq!(
                (names, &report["keys"]),
                (expected.iter().map(|&name| name.into()).collect(), &keys.into())
            );
        }
    }
    ycsb_of_index(&["--fabric", "local", "--workload", "e", "--value-size", "8"]);
    ycsb_of_index(&["--fabric", "local", "--workload", "a", "--value-size", "1KiB", "--threads", "2"]);
}

#[test]
fn bench_ycsb_runs_an_index_over_every_fabric() {
    for fabric in ["shm", "ring", "tcp", "udp"] {
        let report = ycsb_of_index(&["--fabric", fabric, "--workload", "e", "--verify"]);
        assert_eq!(report["fabric"], fabric);
    }
}

#[test]
fn bench_ycsb_runs_art() {
    for (workload, fabric) in [("a", "local"), ("d", "udp"), ("e", "shm")] {
        let common = ["bench", "ycsb", "--system", "art", "--records", "2000", "--json"];
        let run = ["--workload", workload, "--fabric", fabric, "--value-size", "64", "--verify"];
        let report = farside(common.iter().chain(&SHORT).chain(&run)).done().json();
        assert_eq!((&report["errors"], &report["violations"]), (&0.into(), &0.into()), "{report}");
        assert!(report["index"]["leaves_replaced"].as_u64() > Some(0) || workload != "a", "{report}");
        assert!(report["index"]["cache_hits"].as_u64() > Some(0), "{report}");
    }
    farside(["bench", "ycsb", "--system", "art", "--rung", "art"]).refused("art stores have no --rung");
}

#[test]
fn bench_ycsb_climbs_the_ladder_of_an_index() {
    for rung in ["art", "lock-free", "in-place", "embedded-lock", "read-delegation", "write-combining"] {
        let common = ["bench", "ycsb", "--system", "smart", "--records", "2000", "--json"];
        let mix = ["-p", "readproportion=0.4", "-p", "updateproportion=0.4", "-p", "insertproportion=0.2"];
        let run = ["--fabric", "local", "--value-size", "64", "--verify", "--rung", rung];
        let report = farside(common.iter().chain(&SHORT).chain(&run).chain(&mix)).done().json();
        assert_eq!((&report["rung"], &report["violations"]), (&rung.into(), &0.into()), "{report}");
        let has = |name: &str| report["index"][name].as_u64() > Some(0);
        assert_eq!(has("leaves_replaced"), ["art", "lock-free"].contains(&rung), "{report}");
        assert_eq!(has("node_locks"), rung == "art", "{report}");
        // Tasks meet by chance, so the higher rungs may have none.
        let shares_reads = ["read-delegation", "write-combining"].contains(&rung);
        assert!(shares_reads || !has("reads_delegated"), "{report}");
        assert!(rung == "write-combining" || !has("writes_combined"), "{report}");
    }
}

#[test]
fn bench_ycsb_loads_an_index_once_and_runs_on_it() {
    let node = Node::with(&["--memory", "512MiB"]);
    let url = node.url();
    let of_size = |bytes: &str, phase: &str, more: &[&str]| {
        let common =
            ["bench", "ycsb", "--system", "smart", "--records", "2000", "--seconds", "0.3", "--json"];
        let store = ["--pool", url.as_str(), "--store", "ix", "--value-size", bytes, "--phase", phase];
        farside(common.iter().chain(&store).chain(more))
    };
    let phase = |phase: &str, more: &[&str]| of_size("8", phase, more);
    phase("run", &[]).refused("store 'ix' does not exist: load it first");
    assert_eq!(phase("load", &["--workload", "a"]).done().json()["records"], 2000);
    assert_eq!(node.run(["index", "stat", "--store", "ix", "--json"]).done().json()["keys"], 2000);
    for workload in ["a", "b", "c"] {
        let report = phase("run", &["--workload", workload]).done().json();
        assert_eq!((&report["errors"], &report["violations"]), (&0.into(), &0.into()), "{report}");
    }
    phase("run", &["--rung", "art"]).refused("give it with --phase load");
    of_size("9", "run", &[]).refused("was loaded with values of 8 bytes: give --value-size 8");
    phase("run", &["--workload", "e"])
        .refused("for a workload with scans and this one has none, or conversely");
    phase("run", &["--keys", "emails"]).refused("with other --keys");
    node.run(["store", "drop", "ix"]).done();
}

#[test]
fn bench_txn_refuses_rounds_of_checks_that_a_system_lacks() {
    let farm = ["bench", "txn", "--system", "farm", "--prepare"];
    for prepare in ["together", "paper"] {
        farside(farm.iter().chain(&[prepare])).refused("farm stores have no --prepare: leave it out");
    }
}

/// Asserts that a number is within a range.
fn within(number: &Value, low: f64, high: f64) {
    let number = number.as_f64().expect("a number");
    assert!((low..=high).contains(&number), "{number} is not {low} to {high}");
}

/// Runs a benchmark of transactions on a node in the same process, and checks its rows afterwards.
fn bench_txn(system: &str, workload: &str, more: &[&str]) -> Value {
    let common =
        ["bench", "txn", "--system", system, "--workload", workload, "--fabric", "local", "--verify"];
    let size = ["--warm-up", "10ms", "--records", "3000", "--json"];
    let count = if more.contains(&"--operations") { &[][..] } else { &["--operations", "12000"] };
    let report = farside(common.iter().chain(&size).chain(count).chain(more)).done().json();
    assert_eq!((&report["errors"], &report["violations"]), (&0.into(), &0.into()), "{report}");
    assert_eq!(report["read_back"], 3000, "{report}");
    assert!(report["abort_rate"].as_f64().is_some_and(|rate| rate < 0.5), "{report}");
    report
}

/// Of 12000 transactions, the shares are within 0.02 of those of the mix with a probability of more than 0.99999.
fn has_shares(report: &Value, shares: &[(&str, f64)]) {
    let all: f64 = report["operations"]
        .as_object()
        .expect("kinds")
        .values()
        .map(|kind| kind["count"].as_f64().expect("a number"))
        .sum();
    assert_eq!(report["mix"].as_object().map(serde_json::Map::len), Some(shares.len()), "{report}");
    for (kind, share) in shares {
        let count = report["operations"][kind]["count"].as_f64().expect("a number");
        assert!((count / all - share).abs() < 0.02, "{kind}: {count} of {all}, not {share}");
        assert!(report["mix"][kind]["ops_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{report}");
    }
}

const TRANSACTIONAL: [&str; 3] = ["prism-tx", "farm", "fasst"];

#[test]
fn tatp_has_its_mix_and_its_rates_of_success_on_all_systems() {
    for system in TRANSACTIONAL {
        // More transactions than the driver would draw in advance and repeat.
        let report = bench_txn(system, "tatp", &["--operations", "30000"]);
        let shares = [
            ("get subscriber data", 0.35),
            ("get access data", 0.35),
            ("get new destination", 0.10),
            ("update subscriber data", 0.02),
            ("update location", 0.14),
            ("insert call forwarding", 0.02),
            ("delete call forwarding", 0.02),
        ];
        has_shares(&report, &shares);
        let rate = |kind: &str| &report["mix"][kind]["success_rate"];
        for kind in ["get subscriber data", "update location"] {
            within(rate(kind), 1.0, 1.0);
        }
        within(rate("get access data"), 0.58, 0.67);
        within(rate("get new destination"), 0.15, 0.27);
        // There are about 600 of each.
        within(rate("update subscriber data"), 0.45, 0.8);
        within(rate("insert call forwarding"), 0.17, 0.45);
        within(rate("delete call forwarding"), 0.17, 0.45);
        assert_eq!((&report["value_size"], &report["distribution"]), (&40.into(), &"nurand".into()));
    }
}

#[test]
fn smallbank_has_its_mix_and_its_balances_add_up_on_all_systems() {
    for system in TRANSACTIONAL {
        let report = bench_txn(system, "smallbank", &["--threads", "2"]);
        let shares = [
            ("amalgamate", 0.15),
            ("balance", 0.15),
            ("deposit checking", 0.15),
            ("send payment", 0.25),
            ("transact savings", 0.15),
            ("write check", 0.15),
        ];
        has_shares(&report, &shares);
        for (kind, _) in shares.into_iter().filter(|(kind, _)| *kind != "send payment") {
            within(&report["mix"][kind]["success_rate"], 1.0, 1.0);
        }
        assert_eq!((&report["value_size"], &report["keys_per_transaction"]), (&8.into(), &Value::Null));
    }
}

#[test]
fn the_object_store_has_up_to_32_keys_of_100_bytes_on_all_systems() {
    for system in TRANSACTIONAL {
        let report = bench_txn(system, "objects", &["--keys", "4", "--write-share", "0.25"]);
        has_shares(&report, &[("read", 0.316), ("update", 0.684)]);
        // The writes are shorter than one with the longest key.
        bench_txn(system, "objects", &["--keys", "5", "--value-size", "8", "--operations", "600"]);
        let large = ["--keys", "32", "--write-share", "1", "--operations", "600", "--zipf", "0.5"];
        let common =
            ["bench", "txn", "--system", system, "--workload", "objects", "--fabric", "local", "--verify"];
        let report =
            farside(common.iter().chain(&["--records", "3000", "--json"]).chain(&large)).done().json();
        assert_eq!((&report["value_size"], &report["keys_per_transaction"]), (&100.into(), &32.into()));
        assert_eq!((&report["errors"], &report["violations"]), (&0.into(), &0.into()), "{report}");
    }
}

#[test]
fn peers_are_nodes_and_clients_and_measure_together() {
    for (system, fabric) in [("fasst", "udp"), ("farm", "udp"), ("prism-tx", "tcp")] {
        let peers = ["bench", "txn", "--system", system, "--fabric", fabric, "--peers", "3", "--tasks", "4"];
        let size = ["--records", "3000", "--warm-up", "10ms", "--seconds", "0.5", "--json"];
        let report = farside(peers.iter().chain(&size)).done().json();
        assert_eq!((&report["peers"], &report["errors"]), (&3.into(), &0.into()), "{report}");
        let reports = report["reports"].as_array().expect("a report of each peer");
        assert_eq!(reports.len(), 3, "{report}");
        for peer in reports {
            assert_eq!((&peer["fabric"], &peer["violations"]), (&"mixed".into(), &0.into()), "{peer}");
            assert_eq!(peer["cpu_s_per_mop"]["node"], serde_json::Value::Null, "{peer}");
        }
        let sum: f64 = reports.iter().map(|peer| peer["ops_per_s"].as_f64().expect("a rate")).sum();
        within(&report["ops_per_s"], 0.999 * sum, 1.001 * sum);
    }
    let tatp =
        ["bench", "txn", "--system", "fasst", "--peers", "2", "--workload", "tatp", "--records", "500"];
    let report = farside(tatp.iter().chain(&["--seconds", "0.5", "--json"])).done().json();
    let mix = report["mix"].as_object().expect("kinds of transactions");
    let sum: f64 = mix.values().map(|kind| kind["ops_per_s"].as_f64().expect("a rate")).sum();
    within(&report["ops_per_s"], 0.98 * sum, 1.02 * sum);
    within(&mix["get subscriber data"]["success_rate"], 1.0, 1.0);
}

#[test]
fn peers_refuse_what_they_cannot_do() {
    let peers = |flags: &[&str]| farside(["bench", "txn", "--peers", "2"].iter().chain(flags));
    peers(&["--verify"]).refused("--verify does not go with --peers: leave one of them out");
    peers(&["--pool", "udp://127.0.0.1:1"]).refused("--pool does not go with --peers");
    peers(&["--hdr-log", "l.hlog"]).refused("--hdr-log does not go with --peers");
    peers(&["--operations", "100"]).refused("--operations does not go with --peers");
    peers(&["--threads", "33"]).refused("give at most 30 --threads to 2 peers");
    peers(&["--fabric", "shm"])
        .refused("peers do not reach each other over shm: give --fabric udp or tcp, or leave it out");
    farside(["bench", "txn", "--peers", "1"]).refused("1 is not in 2..=8");
}

#[test]
fn bench_txn_refuses_what_a_workload_lacks() {
    let txn = |workload: &str, flags: &[&str]| {
        farside(["bench", "txn", "--fabric", "local", "--workload", workload].iter().chain(flags))
    };
    for workload in ["tatp", "smallbank"] {
        for flags in [&["--keys", "2"][..], &["--zipf", "0.9"], &["--value-size", "8"], &["--collision-free"]]
        {
            txn(workload, flags).refused(&format!("{workload} has no {}: leave it out", flags[0]));
        }
        txn(workload, &["--write-share", "1"]).refused("has no --write-share");
    }
    txn("ycsb-t", &["--write-share", "1"]).refused("ycsb-t has no --write-share: leave it out");
    txn("ycsb-t", &["--keys", "5"])
        .refused("a transaction of ycsb-t has at most 4 records: give fewer --keys");
    txn("ycsb-t", &["--value-size", "100"]).refused("values of ycsb-t have a multiple of 8 bytes, not 100");
    txn("objects", &["--keys", "33"]).refused("33 is not in 1..=32");
    txn("objects", &["--write-share", "2"]).refused("'2' is no share: give 0 to 1");
    txn("objects", &["--value-size", "4"]).refused("an object of 4 bytes has no room for its count");
    txn("objects", &["--value-size", "33KiB"]).refused("values of '33KiB' bytes are not possible");
    txn("objects", &["--records", "3", "--keys", "4"])
        .refused("a transaction of 4 keys needs as many objects");
    for system in TRANSACTIONAL {
        for (workload, keys) in [("objects", "4"), ("objects", "32"), ("ycsb-t", "4")] {
            let bytes = keys.parse::<u64>().expect("a number") * ((16 << 10) + 128);
            txn(workload, &["--system", system, "--keys", keys, "--value-size", "16KiB", "--records", "100"])
                .refused(&format!("bytes, and one of this run may write {bytes}: give fewer --keys"));
        }
    }
    txn("objects", &["--system", "fasst", "--value-size", "32KiB"])
        .refused("at most 16384 bytes: give a smaller --value-size, or --system prism-tx");
    txn("smallbank", &["--records", "1"])
        .refused("smallbank moves money between 2 accounts, and there are 1");
    txn("tpc-c", &[]).refused("tatp");
}

#[test]
fn bench_ycsb_refuses_what_an_index_lacks() {
    let index = |arguments: &[&str]| farside(["bench", "ycsb", "--system", "smart"].iter().chain(arguments));
    index(&["--items", "9"]).refused("smart stores have no --items");
    index(&["--collision-free"]).refused("smart stores have no --collision-free");
    index(&["--threads", "61"]).refused("give at most 60 --threads");
    index(&["--value-size", "49KiB"]).refused("at most 49152 bytes");
    index(&["--value-size", "8", "--verify"]).refused("values of 8 bytes cannot be verified");
    index(&["--keys", "hashed"]).refused("numbers, emails");
    index(&["--rung", "b-tree"])
        .refused("art, lock-free, in-place, embedded-lock, read-delegation, write-combining");
    farside(["bench", "ycsb", "--rung", "art"]).refused("prism-kv stores have no --rung: leave it out");
    let sherman = ["bench", "ycsb", "--system", "sherman", "--rung", "art"];
    farside(sherman).refused("sherman stores have no --rung: leave it out");
    farside(["bench", "ycsb", "--keys", "emails"]).refused("prism-kv stores have no --keys: leave it out");
    farside(["bench", "ycsb", "-p", "scanproportion=1"]).refused("or an index such as --system smart");
}
