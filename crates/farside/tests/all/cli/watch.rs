//! `kv stat --watch`: at a terminal, as lines, and as JSON objects.

use crate::cli::terminal::Terminal;
use crate::support::{Node, Process, command, farside, is_ignored, serve};
use rustix::process::Signal;

const ARGUMENTS: [&str; 6] = ["--memory", "96MiB", "--store", "default", "--quota", "48MiB"];

fn watched(node: &Node) -> Terminal {
    let mut command = command();
    command.env("FARSIDE_POOL", node.url()).args(["kv", "stat", "--watch", "100ms"]);
    let terminal = Terminal::start(command);
    terminal.shows("chains/s");
    terminal
}

#[test]
fn the_screen_is_restored_on_a_key_and_on_a_signal() {
    let node = Node::start();
    let mut terminal = watched(&node);
    assert!(!terminal.is_restored());
    for figure in ["probe, median", "live ", "buffers/s reclaimed", "sessions", "refusals"] {
        terminal.shows(figure);
    }
    terminal.types("xq");
    assert_eq!(terminal.ended(), 0);
    terminal.shows("\x1b[?1049l");
    assert!(terminal.is_restored());
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129)] {
        if is_ignored(signal) {
            continue;
        }
        let mut terminal = watched(&node);
        terminal.signal(signal);
        assert_eq!(terminal.ended(), code);
        terminal.shows("\x1b[?1049l");
        assert!(terminal.is_restored());
    }
}

#[test]
fn the_screen_survives_a_restart_of_the_node() {
    let mut node = Node::start();
    let mut terminal = watched(&node);
    node.process.kill();
    terminal.shows("farside up");
    let again = serve(node.socket(), &ARGUMENTS, node.folder().join("second log"));
    assert!(again.line().contains("serves"));
    terminal.shows(&format!("process {}", again.pid()));
    terminal.shows("chains/s");
    terminal.types("q");
    assert_eq!(terminal.ended(), 0);
}

#[test]
fn without_a_terminal_each_sample_is_a_line() {
    let node = Node::start();
    node.run(["kv", "put", "k", "v"]).done();
    let ran = node.run(["kv", "stat", "--watch", "0.1", "--count", "3"]).done();
    let lines: Vec<&str> = ran.text().lines().collect();
    assert_eq!(lines.len(), 4);
    assert!(lines[0].contains("chains/s") && lines[0].contains("probe p50"), "{}", lines[0]);
    assert!(lines[1..].iter().all(|line| line.contains("MiB") && line.ends_with("us")), "{lines:?}");
    assert!(lines.iter().all(|line| line.len() == lines[0].len()), "lines and heading differ in width");
}

#[test]
fn rates_exclude_the_probe_on_every_fabric() {
    let node = Node::with(&[&ARGUMENTS[..], &["--listen", "tcp://127.0.0.1:0"]].concat());
    let (shm, tcp) = (node.url(), node.listening());
    for url in [&shm, &tcp] {
        let idle = farside(["kv", "stat", "--watch", "100ms", "--count", "2", "--json", "--pool", url])
            .done()
            .json();
        assert_eq!(idle["chains_per_s"], 0.0, "the probe is counted: {idle}");
        assert!(idle["probe_us_p50"].as_f64() > Some(0.0), "{idle}");
        assert_eq!(idle["sessions"], 0, "{idle}");

        let mut command = command();
        command.args(["kv", "stat", "--watch", "100ms", "--json", "--pool", url]);
        let watch = Process::start(command, node.folder().join("watch log"));
        watch.line();
        let lines: String = (0..5000).map(|number| format!("{number}\tvalue\n")).collect();
        node.run_with(["kv", "load", "-", "--pool", url], lines.as_bytes()).done();
        // Each object covers its own interval, and the load may span several.
        let mut ops = 0.0;
        // A put has at least four ops: WRITE, ALLOCATE, CAS and READ.
        while ops < 4.0 * 5000.0 {
            let object: serde_json::Value = serde_json::from_str(&watch.line()).expect("an object");
            let seconds = object["interval_seconds"].as_f64().expect("a number");
            ops += object["ops_per_s"].as_f64().expect("a number") * seconds;
        }
    }
}

#[test]
fn several_nodes_are_added_up_and_one_may_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = |number: u32| folder.path().join(format!("{number}.sock"));
    let start = |number: u32| {
        let node =
            serve(&socket(number), &["--memory", "16MiB"], folder.path().join(format!("log-{number}")));
        node.line();
        node
    };
    let mut nodes: Vec<Process> = (0..3).map(start).collect();
    let pool = [0, 1, 2].map(|number| format!("shm:{}", socket(number).display())).join(",");
    farside(["store", "create", "default", "--quota", "12MiB", "--pool", &pool]).done();
    let records: String = (0..300).map(|number| format!("{number}\tvalue\n")).collect();
    let file = folder.path().join("records.tsv");
    std::fs::write(&file, records).expect("a file");
    let load = || farside(["kv", "load", &file.display().to_string(), "--pool", &pool]);
    load().done();
    let idle =
        farside(["kv", "stat", "--watch", "100ms", "--count", "1", "--json", "--pool", &pool]).done().json();
    assert_eq!((&idle["nodes"], &idle["nodes_answering"]), (&3.into(), &3.into()), "{idle}");
    assert_eq!(idle["chains_per_s"], 0.0, "the probe is counted: {idle}");
    assert_eq!((&idle["stat"]["live_buffers"], &idle["sessions"]), (&300.into(), &0.into()), "{idle}");
    assert!(idle["probe_us_p50"].as_f64() > Some(0.0), "{idle}");

    let mut command = command();
    command.args(["kv", "stat", "--watch", "100ms", "--json", "--pool", &pool]);
    let mut watch = Process::start(command, folder.path().join("watch log"));
    let next = || serde_json::from_str::<serde_json::Value>(&watch.line()).expect("an object");
    next();
    load().done();
    let mut ops = 0.0;
    while ops < 4.0 * 300.0 {
        let object = next();
        let seconds = object["interval_seconds"].as_f64().expect("a number");
        ops += object["ops_per_s"].as_f64().expect("a number") * seconds;
    }
    nodes[1].kill();
    let sample = std::iter::repeat_with(next).find(|sample| sample["nodes_answering"] == 2);
    let sample = sample.expect("the watch goes on");
    assert_eq!(sample["stat"]["live_buffers"], 300, "of its last answer: {sample}");
    assert!(watch.log().contains("node 1"), "{}", watch.log());
    [0, 2].iter().for_each(|node: &usize| nodes[*node].kill());
    assert_eq!(watch.ended(), Some(2), "no node answers");
}

#[test]
fn without_a_terminal_watching_ends_with_the_node() {
    let mut node = Node::start();
    let mut command = command();
    command.env("FARSIDE_POOL", node.url()).args(["kv", "stat", "--watch", "100ms", "--json"]);
    let mut watch = Process::start(command, node.folder().join("watch log"));
    watch.line();
    node.process.kill();
    assert_eq!(watch.ended(), Some(2));
    assert!(watch.log().contains("restart it"), "{}", watch.log());
}

#[test]
fn invalid_flags_of_watching_are_refused() {
    let node = Node::start();
    let url = node.url();
    for (flags, remedy) in [
        (&["--watch", "5us"][..], "give 100ms to 1h"),
        (&["--watch", "2h"], "give 100ms to 1h"),
        (&["--watch", "often"], "give 100ms to 1h"),
        (&["--count", "3"], "--watch"),
        (&["--watch", "--count", "0"], "--help"),
        (&["--watch", "--store", "none"], "the node has: default"),
    ] {
        farside([&["kv", "stat", "--pool", &url], flags].concat()).refused(remedy);
    }
    farside(["kv", "stat", "--watch", "--pool", "shm:/nowhere/node.sock"]).refused("farside up");
}
