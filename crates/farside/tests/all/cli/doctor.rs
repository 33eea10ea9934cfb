//! `doctor`: it tries every fabric, finds mistakes in the settings, and leaves no files behind.

use crate::support::{Node, Process, Ran, command, farside, run, serve, until};
use rustix::process::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Runs `farside doctor ARGUMENTS` with these environment variables. Asserts that the command leaves no file in its
/// temporary folder.
#[track_caller]
fn doctor(arguments: &[&str], variables: &[(&str, &OsStr)]) -> Ran {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = command();
    command.arg("doctor").args(arguments).env("TMPDIR", folder.path()).envs(variables.iter().copied());
    let ran = run(command, b"");
    let left: Vec<_> = std::fs::read_dir(folder.path()).expect("a folder").flatten().collect();
    assert!(left.is_empty(), "it left {left:?}");
    ran
}

/// Parses the JSON output: all checks, by id.
#[track_caller]
fn found(ran: &Ran) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    for line in ran.text().lines() {
        let check: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: '{line}'"));
        for field in ["what", "found"] {
            assert!(check[field].as_str().is_some_and(|text| !text.is_empty()), "{line}");
        }
        for field in ["why", "remedy"] {
            assert!(
                check[field].is_null() || check[field].as_str().is_some_and(|text| !text.is_empty()),
                "{line}"
            );
        }
        let id = check["id"].as_str().expect("text").to_owned();
        assert!(found.insert(id, check).is_none(), "twice: {line}");
    }
    found
}

/// Returns the verdict of a check. Asserts that its finding and its remedy contain these texts.
#[track_caller]
fn verdict(found: &BTreeMap<String, Value>, id: &str, containing: &str, remedy: &str) -> String {
    let check = found.get(id).unwrap_or_else(|| panic!("no {id} in {found:?}"));
    assert!(check["found"].as_str().expect("text").contains(containing), "{check}");
    assert!(check["remedy"].as_str().unwrap_or_default().contains(remedy), "{check}");
    check["verdict"].as_str().expect("text").to_owned()
}

const FABRICS: [&str; 6] = ["local", "shm", "ring", "udp", "tcp", "tls"];

#[test]
fn every_fabric_of_this_release_is_tried_and_works() {
    let ran = doctor(&["--json"], &[]).done();
    let all = found(&ran);
    for fabric in FABRICS {
        let id = format!("fabric.{fabric}");
        assert_eq!(verdict(&all, &id, "a get takes", ""), "ok");
        assert!(all[&id]["p50_us"].as_f64() > Some(0.0), "{}", all[&id]);
    }
    assert_eq!(verdict(&all, "fabric.verbs", "the system lists", ""), "note");
    // Scripts depend on these ids.
    let ids = [
        "kernel",
        "privileges",
        "limit.files",
        "limit.memlock",
        "limit.file_size",
        "limit.address_space",
        "cpu.features",
        "cpu.cores",
        "cpu.quota",
        "cpu.smt",
        "cpu.governor",
        "cpu.clock",
        "cpu.counters",
        "memory.available",
        "memory.cgroup",
        "memory.huge_pages",
        "memory.transparent_huge_pages",
        "memory.memfd",
        "net.udp_buffers",
        "net.udp_segmentation",
        "port.data",
        "port.admin",
        "settings.file",
        "settings.token",
        "settings.tls_ca",
        "settings.variables",
        "socket.folder",
        "socket.default",
        "program.redis",
        "program.memcached",
    ];
    ids.iter().for_each(|id| assert!(all.contains_key(*id), "no {id}"));
    assert_eq!(all.len(), ids.len() + FABRICS.len() + 1, "{:?}", all.keys());
    // The text has the same checks, and no colours, as standard output is not a terminal.
    let reported = doctor(&[], &[]).done();
    for check in all.values() {
        let what = check["what"].as_str().expect("text");
        assert!(
            reported.text().lines().any(|line| line.get(7..).is_some_and(|rest| rest.starts_with(what))),
            "no {what}"
        );
    }
    assert!(
        reported.text().contains("Everything in this release works here.")
            && !reported.text().contains('\u{1b}')
    );
}

#[test]
fn one_fabric_is_tried_alone() {
    for fabric in FABRICS {
        let ran = doctor(&["--fabric", fabric, "--json"], &[]).done();
        let all = found(&ran);
        assert_eq!(all.keys().collect::<Vec<_>>(), [&format!("fabric.{fabric}")]);
    }
    // This machine may have an RDMA device or none: then a check before the attempt fails, and has a remedy.
    let verbs = doctor(&["--fabric", "verbs", "--json"], &[]);
    let all = found(&verbs);
    match verbs.code {
        Some(0) => assert_eq!(verdict(&all, "fabric.verbs", "a get takes", ""), "ok"),
        _ => {
            let failed: Vec<&Value> = all.values().filter(|check| check["verdict"] == "fail").collect();
            assert_eq!((verbs.code, failed.len()), (Some(2), 1), "{all:?}");
            assert!(failed[0]["remedy"].is_string(), "{failed:?}");
            assert!(verbs.err.contains("it does not work here: "), "{}", verbs.err);
        }
    }
    farside(["doctor", "--fabric", "frob"]).refused("local, shm, ring, udp, tcp, tls, verbs");
    farside(["doctor", "--fabric", "shm", "--pool", "shm:/x"]).refused("cannot be used with");
}

#[test]
fn a_failing_fabric_has_a_reason() {
    let mut nowhere = command();
    nowhere.args(["doctor", "--json"]).env("TMPDIR", "/nowhere");
    let ran = run(nowhere, b"");
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("something does not work here: fabric.ring, fabric.shm"), "{}", ran.err);
    let all = found(&ran);
    assert_eq!(verdict(&all, "fabric.local", "a get takes", ""), "ok");
    for fabric in &FABRICS[1..] {
        let said =
            verdict(&all, &format!("fabric.{fabric}"), "name another place with TMPDIR", "shows it again");
        assert_eq!(said, "fail");
    }
    // A limit on the size of files, which applies to shared memory too.
    let limited = |fabric: &str| {
        let mut command = std::process::Command::new("/bin/sh");
        let script = "ulimit -f 1000; exec \"$0\" doctor --json --fabric \"$1\"";
        command.args(["-c", script, env!("CARGO_BIN_EXE_farside"), fabric]).env_clear();
        run(command, b"")
    };
    for (fabric, reason) in [("local", "File too large"), ("shm", "SIGXFSZ")] {
        let ran = limited(fabric);
        assert_eq!(ran.code, Some(2));
        assert_eq!(verdict(&found(&ran), &format!("fabric.{fabric}"), reason, "shows it again"), "fail");
    }
}

#[test]
fn mistakes_in_the_settings_are_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("bad.toml"), "store = 's'\npol = 'x'\n").expect("a file");
    let ran = doctor(&["--json"], &[("FARSIDE_CONFIG", at("bad.toml").as_os_str())]);
    assert_eq!(ran.code, Some(2));
    assert_eq!(verdict(&found(&ran), "settings.file", "line 2: unknown field `pol`", ""), "fail");

    std::fs::write(at("token"), "secret\n").expect("a file");
    std::fs::set_permissions(at("token"), std::fs::Permissions::from_mode(0o644))
        .expect("a file of the test");
    let ran = doctor(
        &["--json"],
        &[("FARSIDE_TOKEN_FILE", at("token").as_os_str()), ("FARSIDE_TLS_CA", OsStr::new("/nowhere/ca"))],
    );
    assert_eq!(ran.code, Some(2));
    let all = found(&ran);
    assert_eq!(verdict(&all, "settings.token", "'chmod 600' it", ""), "fail");
    assert_eq!(verdict(&all, "settings.tls_ca", "/nowhere/ca", ""), "fail");
    assert!(!ran.text().contains("secret\\n"), "the token is printed");

    let ran = doctor(&["--json"], &[("FARSIDE_POOOL", OsStr::new("x"))]).done();
    assert_eq!(verdict(&found(&ran), "settings.variables", "FARSIDE_POOOL", "unset FARSIDE_POOOL"), "warn");
}

#[test]
fn the_state_of_the_default_socket_is_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let ours = folder.path().join("farside");
    let socket = ours.join("default.sock");
    let looked = || {
        let ran = doctor(&["--json"], &[("XDG_RUNTIME_DIR", folder.path().as_os_str())]).done();
        found(&ran)
    };
    let is = |containing: &str, remedy: &str| verdict(&looked(), "socket.default", containing, remedy);
    assert_eq!(is("none at", ""), "ok");
    assert_eq!(verdict(&looked(), "socket.folder", "missing", ""), "ok");
    std::fs::create_dir(&ours).expect("a folder");
    for (mode, expected) in [(0o750, "warn"), (0o700, "ok")] {
        std::fs::set_permissions(&ours, std::fs::Permissions::from_mode(mode)).expect("a file of the test");
        assert_eq!(verdict(&looked(), "socket.folder", &format!("{mode:03o}"), ""), expected);
    }
    std::fs::write(&socket, "").expect("a file");
    assert_eq!(is("it is not a socket", "--socket PATH"), "warn");
    std::fs::remove_file(&socket).expect("a file of the test");
    let mut node = serve(&socket, &["--memory", "8MiB"], folder.path().join("log"));
    node.line();
    let pid = node.pid();
    assert_eq!(is(&format!("pid {pid}, release "), ""), "ok");
    stop(&node);
    assert_eq!(is(&format!("pid {pid} is stopped"), &format!("kill -CONT {pid}")), "warn");
    node.signal(Signal::CONT);
    node.kill();
    assert_eq!(is("was left by a node that died", ""), "note");
    assert!(socket.exists(), "the stale socket is removed");
}

/// Stops a process, and waits until none of its threads runs, because some threads run for a moment after the signal.
#[track_caller]
fn stop(process: &Process) {
    process.signal(Signal::STOP);
    let folder = format!("/proc/{}/task", process.pid());
    let is_stopped = |thread: std::fs::DirEntry| {
        // "tid (name) state ..."
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    };
    until("every thread is stopped", || {
        std::fs::read_dir(&folder).expect("the process exists").flatten().all(is_stopped)
    });
}

/// Runs `doctor --pool URL`, and asserts that it fails at this step, with this finding and remedy.
#[track_caller]
fn ends_at(url: &str, arguments: &[&str], step: &str, containing: &str, remedy: &str) {
    let ran = doctor(&[&["--json", "--pool", url], arguments].concat(), &[]);
    assert_eq!(ran.code, Some(2), "no step failed: {}{}", ran.text(), ran.err);
    assert_eq!(verdict(&found(&ran), step, containing, remedy), "fail");
    let last: Value = ran.json();
    assert_eq!(last["id"], step, "a step after the failed one was tried");
    assert!(ran.err.contains(&format!("the node cannot be reached: {step}")), "{}", ran.err);
}

/// Runs `doctor --pool URL`, and asserts that the command consists of these steps and that all succeed.
#[track_caller]
fn arrives(url: &str, arguments: &[&str], steps: &[&str]) {
    let ran = doctor(&[&["--json", "--pool", url], arguments].concat(), &[]).done();
    let all = found(&ran);
    let mut expected: Vec<String> = steps.iter().map(|step| format!("reach.{step}")).collect();
    expected.sort();
    assert_eq!(all.keys().cloned().collect::<Vec<_>>(), expected);
    assert!(all.values().all(|check| check["verdict"] == "ok"), "{all:?}");
    assert!(all["reach.round_trip"]["p50_us"].as_f64() > Some(0.0));
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn the_way_to_a_node_is_checked_step_by_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    farside(["tls", "new", "--host", "127.0.0.1", "--out", text(&at("tls"))]).done();
    farside(["tls", "new", "--host", "other.example", "--out", text(&at("other"))]).done();
    let secret = at("secret");
    let entry =
        farside(["token", "new", "--name", "web", "--store", "default=all", "--secret-file", text(&secret)])
            .done();
    std::fs::write(at("tokens"), &entry.out).expect("a file");
    std::fs::write(at("wrong"), "wrong\n").expect("a file");
    for name in ["tokens", "wrong"] {
        std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(0o600))
            .expect("a file of the test");
    }
    let [tokens, cert, key, other] = ["tokens", "tls/cert.pem", "tls/key.pem", "other/cert.pem"].map(at);
    let arguments = [
        ["--memory", "32MiB"],
        ["--store", "default"],
        ["--tokens", text(&tokens)],
        ["--tls-cert", text(&cert)],
        ["--tls-key", text(&key)],
        ["--listen", "udp://127.0.0.1:0"],
        ["--listen", "tcp://127.0.0.1:0"],
        ["--listen", "tls://127.0.0.1:0"],
    ]
    .concat();
    let mut node =
        serve(&at("sock"), &[&arguments[..], &["--shm-trusts-all"]].concat(), folder.path().join("log"));
    node.line();
    let listening = || node.line().rsplit_once(" at ").expect("a url").1.to_owned();
    let [udp, tcp, tls] = [listening(), listening(), listening()];
    let shm = format!("shm:{}", text(&at("sock")));

    let token = ["--token-file", text(&secret)];
    let both = [&token[..], &["--tls-ca", text(&cert)]].concat();
    arrives(&shm, &[], &["settings", "socket", "hello", "release", "round_trip"]);
    arrives(&udp, &token, &["settings", "resolve", "hello", "release", "datagrams", "round_trip"]);
    arrives(&tcp, &token, &["settings", "resolve", "connect", "hello", "release", "round_trip"]);
    arrives(&tls, &both, &["settings", "resolve", "connect", "hello", "release", "round_trip"]);
    // A missing store is not a failure to reach the node.
    let ran = doctor(&[&["--json", "--store", "none", "--pool", &tcp], &token[..]].concat(), &[]).done();
    assert_eq!(verdict(&found(&ran), "reach.round_trip", "no store 'none'", ""), "note");

    ends_at(&tcp, &["--token-file", "/nowhere/token"], "reach.settings", "/nowhere/token", "");
    ends_at("frob:x", &[], "reach.url", "no fabric of this release", "tcp://HOST:PORT");
    ends_at("local:", &[], "reach.url", "in the client's own process", "shm:PATH");
    ends_at("tcp://nowhere.invalid", &[], "reach.resolve", "nowhere.invalid", "");
    ends_at("tcp://127.0.0.1:many", &[], "reach.resolve", "write it like", "");
    ends_at(
        "tcp://127.0.0.1:1",
        &[],
        "reach.connect",
        "nobody listens at 127.0.0.1:1",
        "--listen tcp://127.0.0.1:1",
    );
    ends_at("udp://127.0.0.1:1", &[], "reach.hello", "no node serves at", "");
    ends_at(
        "shm:/nowhere/s",
        &[],
        "reach.socket",
        "/nowhere/s does not exist",
        "farside up --socket /nowhere/s",
    );
    ends_at(text(&at("tokens")), &[], "reach.socket", "is not a socket", "--pool shm:PATH");
    for url in [&udp, &tcp] {
        ends_at(url, &[], "reach.token", "it asks for a token", "");
        ends_at(url, &["--token-file", text(&at("wrong"))], "reach.token", "does not know this token", "");
    }
    ends_at(&tls, &token, "reach.tls", "--tls-ca", "");
    ends_at(
        &tls,
        &[&token[..], &["--tls-ca", text(&other)]].concat(),
        "reach.tls",
        "certificate is not trusted",
        "",
    );
    ends_at(&tcp.replace("tcp", "tls"), &both, "reach.tls", "hung up instead of speaking TLS", "");
    stop(&node);
    ends_at(&shm, &[], "reach.hello", &format!("node pid {} is stopped", node.pid()), "");
    ends_at(&udp, &token, "reach.hello", "no node answered", "let UDP port");
    node.signal(Signal::CONT);
    node.kill();
    ends_at(&shm, &[], "reach.hello", "no node serves", "");
}

#[test]
fn checking_a_node_changes_nothing_there() {
    let node = Node::start();
    node.run(["kv", "put", "k", "v"]).done();
    let before = node.run(["kv", "dump"]).done().out;
    let descriptors = node.descriptors();
    node.run(["doctor", "--pool", &node.url()]).done();
    assert!(node.run(["kv", "dump"]).done().out == before);
    until("its session is over", || node.sessions() == 0);
    node.assert_well(descriptors);
}

#[test]
fn doctor_does_not_panic_if_standard_output_is_closed() {
    for arguments in
        [&["doctor"][..], &["doctor", "--json"], &["completions", "bash"], &["man"], &["man", "kv"]]
    {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = command();
        let output = command.args(arguments).stdout(writer).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(141) && said.is_empty(), "{arguments:?}: {said}");
    }
}
