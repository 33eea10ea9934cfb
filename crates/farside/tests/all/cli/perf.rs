//! `perf`: perftest's columns, its server and its client, and their refusals.

use crate::support::{Node, Process, command, farside, until};
use rustix::process::Signal;
use std::path::Path;
use tempfile::TempDir;

const TESTS: [&str; 5] = ["read", "write", "atomic", "chain", "call"];
const LATENCY: &str = "#bytes #iterations t_min[usec] t_max[usec] t_typical[usec] t_avg[usec] t_stdev[usec] 99% \
                       percentile[usec] 99.9% percentile[usec]";
const BANDWIDTH: &str = "#bytes #iterations BW peak[MiB/sec] BW average[MiB/sec] MsgRate[Mpps]";
const GBITS: &str = "#bytes #iterations BW peak[Gb/sec] BW average[Gb/sec] MsgRate[Mpps]";

/// Runs `farside perf ARGUMENTS`; returns the names of the columns, and the numbers of each row.
#[track_caller]
fn table(arguments: &str) -> (String, Vec<Vec<f64>>) {
    let ran = farside(["perf"].into_iter().chain(arguments.split_whitespace())).done();
    let mut lines = ran.text().lines().filter(|line| !line.starts_with("----") && !line.contains(" : "));
    assert!(lines.next().is_some_and(|title| title.trim().ends_with("Test")), "{}", ran.text());
    let names = lines.next().expect("names").split_whitespace().collect::<Vec<_>>().join(" ");
    let numbers = |line: &str| line.split_whitespace().map(|word| word.parse().expect("a number")).collect();
    (names, lines.map(numbers).collect())
}

#[track_caller]
fn is_latency(row: &[f64]) {
    let [_, _, min, max, typical, average, deviation, p99, p999] = *row else { panic!("columns: {row:?}") };
    assert!(0.0 < min && min <= typical && typical <= p99 && p99 <= p999 && p999 <= max, "{row:?}");
    assert!(min <= average && average <= max && deviation >= 0.0, "{row:?}");
}

/// Checks a row of a bandwidth test. `per_mpps` is the bandwidth at a `MsgRate` of 1 Mpps, in the unit of the row.
#[track_caller]
fn is_bandwidth(row: &[f64], per_mpps: f64) {
    let [_, _, peak, average, rate] = *row else { panic!("columns: {row:?}") };
    assert!(0.0 < average && average <= peak && rate > 0.0, "{row:?}");
    // In a slow run, rounding to two decimals can be more than 2 % of the average.
    let off = (average - rate * per_mpps).abs();
    assert!(off < 0.02 * average + 0.005, "both columns are of the same requests: {row:?}");
}

/// A `farside perf` server at a free port.
struct Server {
    process: Process,
    folder: TempDir,
    port: String,
}

impl Server {
    fn start(test: &str, arguments: &[&str]) -> Server {
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = command();
        command.args(["perf", test, "-p", "0"]).args(arguments);
        let process = Process::start(command, folder.path().join("log"));
        let at = process.line();
        let port = at.rsplit(':').next().expect("a url").to_owned();
        let hint = process.line();
        assert!(
            at.contains("perf serves at ") && hint.contains(&format!("farside perf {test} ")),
            "{at} {hint}"
        );
        Server { process, folder, port }
    }
}

#[test]
fn every_test_prints_perftests_columns_over_every_fabric() {
    for fabric in ["local", "shm", "udp", "tcp", "tls", "ring"] {
        for test in TESTS {
            let (names, rows) = table(&format!("{test}_lat --fabric {fabric} -n 50"));
            assert_eq!(names, LATENCY);
            is_latency(&rows[0]);
            assert_eq!((rows.len(), rows[0][1]), (1, 50.0), "{rows:?}");
            let (names, rows) = table(&format!("{test}_bw --fabric {fabric} -n 600 -t 16"));
            assert_eq!(names, BANDWIDTH);
            is_bandwidth(&rows[0], 1e6 * rows[0][0] / f64::from(1 << 20));
            assert_eq!((rows.len(), rows[0][1]), (1, 600.0), "{rows:?}");
        }
    }
}

#[test]
fn flags_select_the_request_and_its_size() {
    let size = |arguments: &str| table(arguments).1[0][0];
    assert_eq!(size("read_lat --fabric local"), 2.0);
    assert_eq!(size("read_bw --fabric local"), 32768.0);
    assert_eq!(size("atomic_bw --fabric local"), 8.0);
    assert_eq!(size("atomic_lat --fabric local --op cas -s 16"), 16.0);
    assert_eq!(size("atomic_bw --fabric shm -A CMP_AND_SWAP"), 8.0);
    assert_eq!(size("chain_bw --chain put --fabric shm -s 4KiB -t 1"), 4096.0);
    let (names, rows) = table("write_bw --fabric local --report_gbits -s 1000 -D 50ms");
    assert_eq!(names, GBITS);
    is_bandwidth(&rows[0], 8000.0 / 1e3);
    assert!(rows[0][1] > 1.0, "{rows:?}");
    is_latency(&table("read_lat --fabric shm -D 0.05").1[0]);
    let titles = [
        ("read_lat", "READ Latency Test"),
        ("atomic_bw", "FETCH-ADD BW Test"),
        ("atomic_lat --op cas", "CAS Latency Test"),
        ("chain_lat", "GET Chain Latency Test"),
        ("chain_bw --chain put", "PUT Chain BW Test"),
    ];
    for (test, title) in titles {
        let arguments = format!("perf {test} --fabric local -n 10");
        assert!(farside(arguments.split_whitespace()).done().text().contains(title), "{test}");
    }
}

#[test]
fn all_measures_powers_of_two_up_to_the_largest_size() {
    let powers: Vec<f64> = (1..16).map(|bit| f64::from(1 << bit)).collect();
    for test in ["read_lat", "write_bw", "chain_lat --chain put", "call_bw"] {
        let (_, rows) = table(&format!("{test} -a -n 20 --fabric local"));
        assert_eq!(rows.iter().map(|row| row[0]).collect::<Vec<_>>(), powers, "{test}");
    }
}

#[test]
fn the_largest_request_is_carried_and_one_byte_more_is_refused() {
    for fabric in ["local", "shm", "udp", "tcp", "tls", "ring"] {
        for (test, max) in [
            ("read", 65528u32),
            ("write", 65496),
            ("chain", 65408),
            ("chain --chain put", 65408),
            ("call", 61432),
        ] {
            let (test, flags) = test.split_once(' ').unwrap_or((test, ""));
            let (_, rows) = table(&format!("{test}_lat {flags} --fabric {fabric} -n 5 -s {max}"));
            assert_eq!(rows[0][0], f64::from(max));
            let refused = format!("perf {test}_bw {flags} --fabric {fabric} -s {}", max + 1);
            farside(refused.split_whitespace()).refused(&format!("carries {max} at most"));
        }
    }
}

#[test]
fn results_are_available_as_json_lines_and_files() {
    let line = farside(["perf", "read_lat", "--fabric", "local", "--json", "-n", "20"]).done();
    assert_eq!(line.text().lines().count(), 1);
    let line = line.json();
    assert_eq!((&line["test"], &line["fabric"]), (&"read_lat".into(), &"local".into()));
    assert_eq!((&line["bytes"], &line["iterations"], &line["tx_depth"]), (&2.into(), &20.into(), &1.into()));
    for field in ["t_min_us", "t_max_us", "t_typical_us", "t_avg_us", "p99_us", "p999_us"] {
        assert!(line[field].as_f64() > Some(0.0), "{field}: {line}");
    }
    let lines = farside(["perf", "write_bw", "--fabric", "shm", "--json", "-a", "-n", "20"]).done();
    assert_eq!(lines.text().lines().count(), 15);
    for field in ["bw_peak_mib_per_s", "bw_average_mib_per_s", "msg_rate_mpps"] {
        assert!(lines.json()[field].as_f64() > Some(0.0), "{field}: {}", lines.json());
    }
    let folder = tempfile::tempdir().expect("a folder");
    let of = |path: &Path| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(path).expect("a file")).expect("JSON")
    };
    let file = folder.path().join("one.json");
    std::fs::write(&file, "what was there before, which may be longer or shorter").expect("written");
    let named = ["perf", "read_bw", "--fabric", "local", "-n", "20", "--out_json_file"];
    farside(named.iter().map(Path::new).chain([&*file])).done();
    let one = of(&file);
    assert_eq!((&one["test_info"]["test"], &one["test_info"]["TX_depth"]), (&"read_bw".into(), &64.into()));
    assert_eq!((&one["results"]["MsgSize"], &one["results"]["n_iterations"]), (&32768.into(), &20.into()));
    let mut many = command();
    many.args(["perf", "read_lat", "--fabric", "local", "-n", "20", "-a", "--out_json"]);
    many.current_dir(folder.path());
    crate::support::run(many, b"").done();
    let many = of(&folder.path().join("perftest_out.json"));
    assert_eq!(many["results"].as_array().map(Vec::len), Some(15));
    assert!(many["results"][14]["t_typical"].as_f64() > Some(0.0), "{many}");
    // An unwritable file is noticed before anything is measured.
    for wrong in ["/nowhere/out.json", "/tmp"] {
        farside(["perf", "read_lat", "--fabric", "local", "--out_json_file", wrong])
            .refused("with --out_json_file");
    }
}

#[test]
fn a_server_serves_clients_of_any_test_one_after_another() {
    for device in ["tcp", "udp"] {
        let mut server = Server::start("read_lat", &["-d", device]);
        for test in TESTS {
            is_latency(&table(&format!("{test}_lat localhost -d {device} -p {} -n 20", server.port)).1[0]);
            let rows = table(&format!("{test}_bw 127.0.0.1 -d {device} -p {} -n 20", server.port)).1;
            assert_eq!(rows[0][1], 20.0);
        }
        table(&format!("chain_bw --chain put 127.0.0.1 -d {device} -p {} -n 2000 -s 60000", server.port));
        server.process.signal(Signal::INT);
        assert_eq!(server.process.ended(), Some(0), "the server exits without an error");
        let gone = format!("perf read_lat 127.0.0.1 -d {device} -p {}", server.port);
        farside(gone.split_whitespace())
            .refused("start the server on that host with 'farside perf read_lat', without a HOST");
    }
}

#[test]
fn a_port_in_use_is_refused() {
    let server = Server::start("write_lat", &["-d", "tcp"]);
    let again = ["perf", "write_lat", "-p", &server.port];
    farside(again).refused("perhaps another perf server");
}

#[test]
fn a_node_that_is_not_a_perf_server_is_measured_by_url() {
    let node = Node::with(&[
        "--memory",
        "256MiB",
        "--store",
        "default",
        "--quota",
        "32MiB",
        "--listen",
        "tcp://127.0.0.1:0",
    ]);
    let url = node.listening();
    let port = url.rsplit(':').next().expect("a port");
    let by_host = ["perf", "read_lat", "127.0.0.1", "-p", port];
    farside(by_host)
        .refused("there is no store 'perf'")
        .refused(&format!("measure any other node with --pool {url}"));
    for url in [&url, &node.url()] {
        is_latency(&table(&format!("read_lat --pool {url} -n 20")).1[0]);
        table(&format!("chain_bw --chain put --pool {url} -n 500"));
    }
    assert_eq!(node.run(["store", "list"]).done().text().lines().count(), 1, "nothing is left behind");
    until("all sessions are closed", || node.sessions() == 0);
    let small = Node::with(&["--memory", "8MiB"]);
    farside(["perf", "read_lat", "--pool", &small.url()]).refused("give --fabric instead of --pool");
    // A raw store has no keys.
    node.run(["store", "create", "plain", "--kind", "raw", "--quota", "4MiB"]).done();
    node.run(["kv", "--store", "plain", "get", "k"])
        .refused("is plain memory, not a key-value store: name another store");
    node.run(["store", "create", "p", "--kind", "raw", "--items", "5"]).refused("omit --items");
}

#[test]
fn a_measurement_ended_by_a_signal_leaves_nothing_behind() {
    let node = Node::with(&["--memory", "64MiB"]);
    let mut long = command();
    long.args(["perf", "read_bw", "-D", "600", "--pool", &node.url()]);
    let mut perf = Process::start(long, node.folder().join("perf"));
    until("it measures", || node.run(["store", "list"]).done().text().starts_with("perf-"));
    perf.signal(Signal::TERM);
    assert_eq!(perf.ended(), None, "a signal ended it");
    assert!(node.run(["store", "list"]).done().out.is_empty());
}

#[test]
fn a_measurement_ends_when_its_server_does() {
    for test in ["read_lat", "read_bw", "call_lat"] {
        let mut server = Server::start(test, &["-d", "tcp"]);
        let mut long = command();
        long.args(["perf", test, "127.0.0.1", "-D", "600", "-p", &server.port]);
        let mut client = Process::start(long, server.folder.path().join("client"));
        until("it measures", || client.log().contains("measuring"));
        std::thread::sleep(std::time::Duration::from_millis(200));
        server.process.kill();
        assert_eq!(client.ended(), Some(2), "{}", client.log());
    }
}

#[test]
fn a_client_disturbed_by_another_reports_no_figures() {
    for test in ["atomic_lat", "atomic_bw"] {
        let server = Server::start(test, &["-d", "tcp"]);
        let mut long = command();
        long.args(["perf", test, "127.0.0.1", "-D", "600", "-p", &server.port]);
        let mut client = Process::start(long, server.folder.path().join("client"));
        until("it measures", || client.log().contains("measuring"));
        until("another client has interfered", || {
            let other = ["perf", test, "127.0.0.1", "-n", "500", "-p", &server.port];
            farside(other);
            client.log().contains("another client uses the same store")
        });
        assert_eq!(client.ended(), Some(2), "{}", client.log());
    }
}

#[test]
fn only_clients_with_a_token_may_measure() {
    let folder = tempfile::tempdir().expect("a folder");
    let [secret, tokens] = ["secret", "tokens.toml"].map(|name| folder.path().join(name));
    let mut new = command();
    new.args(["token", "new", "--name", "meter", "--store", "perf=all", "--secret-file"]).arg(&secret);
    let entry = crate::support::run(new, b"").done();
    std::fs::write(&tokens, &entry.out).expect("written");
    std::fs::set_permissions(&tokens, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("ours");
    let tokens = tokens.display().to_string();
    for device in ["tcp", "udp"] {
        let server = Server::start("read_lat", &["-d", device, "--tokens", &tokens]);
        let with = format!("-p {} -d {device} -n 20 --token-file {}", server.port, secret.display());
        for test in TESTS {
            is_latency(&table(&format!("{test}_lat 127.0.0.1 {with}")).1[0]);
        }
        let without = format!("perf read_lat 127.0.0.1 -p {} -d {device}", server.port);
        farside(without.split_whitespace()).refused("token");
    }
    let open = ["perf", "read_lat", "-p", "0", "--bind", "0.0.0.0"];
    farside(open).refused("list the allowed clients with --tokens");
}

#[test]
fn invalid_arguments_are_refused_with_a_remedy() {
    let wrong = [
        ("frob", "possible values: read_lat"),
        (
            "read_lat 127.0.0.1 -p 1",
            "start the server on that host with 'farside perf read_lat', without a HOST",
        ),
        ("read_lat 127.0.0.1 -p 1 -d udp", "without a HOST; other machines can reach it only with --bind"),
        ("read_lat 127.0.0.1:18515", "the port goes to --port"),
        ("read_lat tcp://127.0.0.1", "a URL to --pool"),
        ("read_lat nowhere.invalid", "check the host's name"),
        ("read_lat 127.0.0.1 -b", "a node sends none: omit it"),
        ("read_lat 127.0.0.1 -x 3", "which no fabric uses: omit it"),
        ("read_lat 127.0.0.1 -d mlx5_0", "give tcp or udp"),
        ("read_lat 127.0.0.1 -n 10 -D 1", "cannot be used with"),
        ("read_lat 127.0.0.1 --fabric udp", "cannot be used with"),
        ("read_lat 127.0.0.1 --pool shm:/x", "cannot be used with"),
        ("read_lat 127.0.0.1 --tokens x", "cannot be used with"),
        ("read_lat --fabric shm -p 5", "cannot be used with"),
        ("read_lat --fabric shm -s 2 -a", "cannot be used with"),
        ("read_lat --fabric frob", "local, shm"),
        ("read_lat --fabric shm -s 0", "give 1 or more"),
        ("read_lat --fabric shm -s 2TiB", "carries 65528 at most"),
        ("read_lat --fabric shm -s much", "write it like"),
        ("read_lat --fabric shm -n 4", "5..=100000000"),
        ("read_lat --fabric shm -D 0", "give 10ms to"),
        ("read_lat --fabric shm -D soon", "a number alone is seconds"),
        ("read_lat --fabric shm -t 4", "omit --tx-depth"),
        ("read_bw --fabric shm -t 65", "1..=64"),
        ("read_lat --fabric shm --report_gbits", "name a *_bw test"),
        ("read_lat --fabric shm --op cas", "applies to atomic_lat and atomic_bw"),
        ("read_lat --fabric shm --chain put", "applies to chain_lat and chain_bw"),
        ("atomic_lat --fabric shm -a", "omit --all"),
        ("atomic_lat --fabric shm -s 16", "8 bytes, not 16"),
        ("atomic_lat --fabric shm --op cas -s 24", "8 or 16 bytes, not 24"),
        ("atomic_lat --fabric shm --op swap", "faa, cas"),
        ("read_lat --pool local:", "start one with 'farside up'"),
        ("read_lat --pool shm:/nowhere/node.sock", "start one with 'farside up'"),
        ("read_lat --insecure-udp -p 0", "omit --insecure-udp"),
        ("read_lat --token-file x -p 0", "list the server's clients with --tokens"),
        ("read_lat --tokens /nowhere/tokens -p 0", "name a file"),
        ("read_lat --bind here", "--help"),
    ];
    for (arguments, remedy) in wrong {
        farside(["perf"].into_iter().chain(arguments.split_whitespace())).refused(remedy);
    }
}
