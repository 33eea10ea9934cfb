//! Starting and stopping nodes: sockets, signals, and memory files.

use crate::cli::{MIB, bytes};
use crate::support::{Process, command, farside, is_ignored, run, serve, until};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

#[test]
fn up_serves_and_a_second_up_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let with_home = |arguments: &[&str]| {
        let mut command = command();
        command.env("XDG_RUNTIME_DIR", folder.path()).args(arguments);
        command
    };
    let mut up = Process::start(with_home(&["up", "--memory", "512MiB"]), folder.path().join("log"));
    let socket = folder.path().join("farside/default.sock");
    assert!(up.line().ends_with(&format!("shm:{}", socket.display())));
    assert!(up.line().contains("another terminal"));
    // The commands that it prints work unchanged in any shell.
    for expected in ["", "hello", "errors"] {
        let mut proposed = std::process::Command::new("/bin/sh");
        proposed.arg("-c").arg(up.line()).env_clear().env("XDG_RUNTIME_DIR", folder.path());
        assert!(run(proposed, b"").done().text().contains(expected));
    }
    assert!(up.line().contains("Ctrl-C"));

    let second = run(with_home(&["up"]), b"").refused("stop it, or serve elsewhere by --socket");
    assert!(second.err.contains(&up.pid().to_string()), "{}", second.err);
    assert_eq!(run(with_home(&["kv", "get", "greeting"]), b"").done().out, b"hello");
    run(with_home(&["store", "create", "another"]), b"").done();

    up.signal(Signal::INT);
    assert_eq!(up.ended(), Some(0));
    assert!(!socket.exists(), "the socket of a stopped node is left behind");
    run(with_home(&["kv", "get", "greeting"]), b"").refused("start one with 'farside up'");
}

#[test]
fn a_stopped_nodes_socket_is_removed_and_a_killed_ones_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let (socket, log) = (folder.path().join("node.sock"), folder.path().join("log"));
    let url = format!("shm:{}", socket.display());
    let small = ["--memory", "16MiB", "--store", "default"];
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT] {
        if is_ignored(signal) {
            continue;
        }
        let mut node = serve(&socket, &small, log.clone());
        node.line();
        farside(["kv", "put", "k", "v", "--pool", &url]).done();
        node.signal(signal);
        assert_eq!(node.ended(), Some(0), "{}", node.log());
        assert!(!socket.exists());
    }
    let mut node = serve(&socket, &small, log.clone());
    node.line();
    node.kill();
    assert!(socket.exists());
    farside(["info", "--pool", &url]).refused("no node serves");
    let node = serve(&socket, &small, log.clone());
    node.line();
    farside(["kv", "put", "k", "v", "--pool", &url]).done();
    let mut second = serve(&socket, &small, folder.path().join("second"));
    assert_eq!(second.ended(), Some(2));
    assert!(second.log().contains("already"), "{}", second.log());
    assert_eq!(farside(["kv", "get", "k", "--pool", &url]).done().out, b"v");
}

#[test]
fn one_of_several_nodes_takes_over_a_stale_socket() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let url = format!("shm:{}", socket.display());
    for round in 0..5 {
        let log = |number| folder.path().join(format!("log-{round}-{number}"));
        let mut nodes: Vec<Process> =
            (0..4).map(|number| serve(&socket, &["--memory", "8MiB"], log(number))).collect();
        until("three are refused", || {
            nodes.iter_mut().filter(|node| node.log().contains("already")).count() == 3
        });
        let pid = farside(["info", "--json", "--pool", &url]).done().json()["pid"].clone();
        let mut serving = nodes.into_iter().filter(|node| node.pid() == pid);
        serving.next().expect("one of them serves").kill(); // Leaves a stale socket for the next round.
    }
}

#[test]
fn a_node_does_not_remove_its_successors_socket() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let mut first = serve(&socket, &["--memory", "8MiB"], folder.path().join("first"));
    first.line();
    std::fs::remove_file(&socket).expect("its socket");
    let second = serve(&socket, &["--memory", "8MiB"], folder.path().join("second"));
    second.line();
    first.signal(Signal::TERM);
    assert_eq!(first.ended(), Some(0));
    let info = farside(["info", "--json", "--pool", &format!("shm:{}", socket.display())]).done().json();
    assert_eq!(info["pid"], second.pid());
}

#[test]
fn an_ignored_sighup_does_not_stop_a_node() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let mut command = std::process::Command::new("/bin/sh");
    let script = "trap '' HUP; exec \"$0\" serve --die-with-parent --memory 8MiB --socket \"$1\"";
    command.args(["-c", script, env!("CARGO_BIN_EXE_farside")]).arg(&socket).env_clear();
    let mut node = Process::start(command, folder.path().join("log"));
    node.line();
    node.signal(Signal::HUP);
    farside(["info", "--pool", &socket.display().to_string()]).done();
    node.signal(Signal::TERM);
    assert_eq!(node.ended(), Some(0));
}

#[test]
fn commands_that_up_prints_work_in_spite_of_other_settings() {
    let folder = tempfile::tempdir().expect("a folder");
    let inner = folder.path().join("it's a folder");
    std::fs::create_dir(&inner).expect("a folder");
    let mut command = command();
    command.args(["up", "--memory", "512MiB", "--socket", "node.sock"]).current_dir(&inner);
    command.env("FARSIDE_POOL", "shm:/nowhere/node.sock").env("FARSIDE_STORE", "none");
    let up = Process::start(command, folder.path().join("log"));
    assert!(up.line().contains("serves") && up.line().contains("another terminal"));
    for expected in ["", "hello", "errors"] {
        let mut proposed = std::process::Command::new("/bin/sh");
        proposed.arg("-c").arg(up.line()).env_clear();
        proposed.env("FARSIDE_POOL", "shm:/nowhere/node.sock").env("FARSIDE_STORE", "none");
        assert!(run(proposed, b"").done().text().contains(expected));
    }
}

#[test]
fn files_that_are_no_nodes_socket_are_not_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("file"), "precious").expect("a file");
    std::fs::create_dir(at("folder")).expect("a folder");
    std::os::unix::fs::symlink(at("file"), at("link")).expect("a link");
    let _other = std::os::unix::net::UnixListener::bind(at("stream")).expect("a socket");
    let refuses = |path: &std::path::Path, remedy: &str| {
        let arguments = [OsStr::new("serve"), "--memory".as_ref(), "8MiB".as_ref(), "--socket".as_ref()];
        farside(arguments.into_iter().chain([path.as_os_str()])).refused(remedy);
    };
    for name in ["file", "folder", "link", "stream"] {
        refuses(&at(name), "remove it, or serve elsewhere by --socket");
        assert!(at(name).exists());
    }
    assert_eq!(std::fs::read(at("file")).expect("the file still exists"), b"precious");
    refuses(&at(&"x".repeat(120)), "give a shorter --socket");
    refuses(&at("no/folder/node.sock"), "make it, or serve elsewhere by --socket");
    refuses(std::path::Path::new("/proc/node.sock"), "serve elsewhere by --socket");
    farside([OsStr::new("info"), "--pool".as_ref(), at("stream").as_os_str()]).refused("of another type");
    // The folder of the default socket must be private.
    std::fs::create_dir(at("farside")).expect("a folder");
    for mode in [0o777, 0o750] {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(at("farside"), std::fs::Permissions::from_mode(mode))
            .expect("a file of the test");
        let mut up = command();
        up.env("XDG_RUNTIME_DIR", folder.path()).args(["up", "--memory", "8MiB"]);
        run(up, b"").refused("no other user can access: remove it");
    }
    let mut up = command();
    up.env("XDG_RUNTIME_DIR", at("file")).args(["up", "--memory", "8MiB"]);
    run(up, b"").refused("serve elsewhere by --socket");
}

#[test]
fn a_node_does_not_serve_if_its_store_cannot_be_created() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let wrong: [(&[&str], &str); 3] = [
        (&["--store", "a/b"], "use 1 to 64 letters"),
        (&["--store", "s", "--items", "9999999"], "fewer --items"),
        (&["--store", "s", "--quota", "1GiB"], "smaller --quota"),
    ];
    for (arguments, remedy) in wrong {
        let serve = ["serve", "--memory", "16MiB", "--socket"].map(OsStr::new);
        let arguments = serve.into_iter().chain([socket.as_os_str()]).chain(arguments.iter().map(OsStr::new));
        farside(arguments).refused(remedy);
        assert!(!socket.exists());
    }
}

#[test]
fn a_node_survives_when_its_output_is_closed() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let url = format!("shm:{}", socket.display());
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut command = command();
    command.args(["serve", "--die-with-parent", "--memory", "32MiB", "--store", "default", "--socket"]);
    command.arg(&socket).stdout(Stdio::piped()).stderr(writer).stdin(Stdio::null());
    let mut node = command.spawn().expect("it starts");
    let mut ready = String::new();
    BufReader::new(node.stdout.take().expect("piped")).read_line(&mut ready).expect("it serves");
    drop((reader, command)); // The command holds the other end of the pipe.
    // A killed client makes the node write to its log.
    let mut client = crate::support::command();
    client.args(["kv", "stat", "--watch", "1s", "--pool", &url]);
    let mut client = Process::start(client, folder.path().join("client.log"));
    client.line();
    client.kill();
    until("the node notices the client's end", || {
        farside(["info", "--json", "--pool", &url]).done().json()["sessions"] == 1
    });
    farside(["kv", "put", "k", "v", "--pool", &url]).done();
    node.kill().and_then(|()| node.wait()).expect("a child process");
}

#[test]
fn a_memory_file_is_served_again_and_other_files_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let (socket, file) = (folder.path().join("node.sock"), folder.path().join("memory"));
    let log = |name: &str| folder.path().join(name);
    let url = format!("shm:{}", socket.display());
    let named = file.display().to_string();
    let mut node =
        serve(&socket, &["--memory", "16MiB", "--store", "default", "--memory-file", &named], log("1"));
    node.line();
    farside(["kv", "put", "k", "v", "--pool", &url]).done();
    let elsewhere = folder.path().join("other.sock");
    let elsewhere = elsewhere.display().to_string();
    let refused = |arguments: &[&str], reason: &str| {
        farside(["serve", "--socket", &elsewhere].iter().chain(arguments)).refused(reason);
    };
    refused(&["--memory-file", &named], "use that one, or stop it");
    node.kill();
    refused(&["--memory-file", &named, "--memory", "32MiB"], "16777216");
    // The default of --memory is the file's size.
    let mut node = serve(&socket, &["--memory-file", &named], log("2"));
    assert!(node.line().contains("16.0 MiB"));
    assert_eq!(farside(["kv", "get", "k", "--pool", &url]).done().out, b"v");
    node.kill();
    // A difference between the flags and the store in the file causes a warning.
    for (arguments, warned) in [
        (&["--store", "default", "--quota", "4MiB"][..], true),
        (&["--store", "default", "--items", "9999999"], true),
        (&["--store", "default", "--collision-free"], true),
        (&["--store", "default"], false),
    ] {
        let again = [&["--memory-file", &named], arguments].concat();
        let mut node = serve(&socket, &again, log("again"));
        node.line();
        let said = node.log();
        let is_warned = said.contains("already has a store 'default'") && said.contains("a quota of");
        assert_eq!(is_warned, warned, "{said}");
        node.kill();
    }
    refused(&["--memory-file", &named, "--store", "other"], "drop a store, or serve more --memory");
    let node = serve(&socket, &["--memory-file", &named], log("3"));
    node.line();
    refused(&["--memory-file", &named], "use that one, or stop it");

    std::fs::write(log("text"), "precious").expect("a file");
    std::fs::write(log("noise"), bytes(8 * MIB, 1)).expect("a file");
    refused(
        &["--memory-file", &log("text").display().to_string()],
        "is not a farside memory: name another file",
    );
    refused(&["--memory-file", &log("noise").display().to_string()], "not a farside memory");
    refused(&["--memory-file", &folder.path().display().to_string()], "could not open");
    refused(&["--memory-file", "/nowhere/file"], "could not open");
    refused(&["--memory-file", "/dev/zero", "--memory", "8MiB"], "is not a regular file");
    refused(&["--memory-file", &named, "--pages", "small"], "--help");
    // An existing empty file gets the permissions of a new one.
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(log("empty"), "").expect("a file");
    std::fs::set_permissions(log("empty"), std::fs::Permissions::from_mode(0o666))
        .expect("a file of the test");
    let arguments = ["--memory", "16MiB", "--memory-file", &log("empty").display().to_string()];
    serve(std::path::Path::new(&elsewhere), &arguments, log("4")).line();
    let mode = std::fs::metadata(log("empty")).expect("the file exists").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(std::fs::read(log("text")).expect("the file still exists"), b"precious");
    assert!(std::fs::read(log("noise")).expect("the file still exists") == bytes(8 * MIB, 1));
}

#[test]
fn up_starts_several_nodes_and_shows_each() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = command();
    command
        .args(["up", "--nodes", "3", "--memory", "32MiB", "--socket"])
        .arg(folder.path().join("pool.sock"));
    let mut up = Process::start(command, folder.path().join("log"));
    let urls: Vec<String> = (0..3)
        .map(|number| format!("shm:{}", folder.path().join(format!("pool-{number}.sock")).display()))
        .collect();
    let mut pids = Vec::new();
    for url in &urls {
        let line = up.line();
        assert!(line.ends_with(url), "{line}");
        let pid = line.split_whitespace().nth(3).and_then(|pid| pid.parse().ok());
        pids.push(rustix::process::Pid::from_raw(pid.expect("a pid")).expect("not 0"));
    }
    let pool = up.line();
    let pool = pool.strip_prefix("farside: pool ").expect("the pool").to_owned();
    assert_eq!(pool, urls.join(","));

    let objects = |arguments: &[&str]| -> Vec<serde_json::Value> {
        let ran = farside([arguments, &["--pool", &pool, "--json"]].concat()).done();
        ran.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    for (number, info) in objects(&["info"]).iter().enumerate() {
        assert_eq!((&info["node"], &info["url"]), (&number.into(), &urls[number].as_str().into()));
        assert_eq!(info["pid"], pids[number].as_raw_nonzero().get());
    }
    farside(["store", "create", "extra", "--quota", "4MiB", "--pool", &urls[1]]).done();
    let names: Vec<_> = objects(&["store", "list"])
        .iter()
        .map(|store| (store["node"].clone(), store["name"].clone()))
        .collect();
    assert_eq!(
        names,
        [(0, "default"), (1, "default"), (1, "extra"), (2, "default")]
            .map(|(node, name)| (node.into(), name.into()))
    );
    let shown = farside(["store", "list", "--pool", &pool]).done();
    assert!(shown.text().contains(&format!("node 1 at {}\ndefault\tprism-kv", urls[1])), "{}", shown.text());
    let checked = farside(["doctor", "--pool", &pool]).done();
    assert!(checked.text().contains("All nodes can be reached."), "{}", checked.text());
    // A file with the same nodes.
    let file = folder.path().join("nodes.toml");
    let nodes: String = urls.iter().map(|url| format!("[[node]]\nurl = \"{url}\"\n")).collect();
    std::fs::write(&file, nodes).expect("a file");
    let by_file = farside(["info", "--json", "--pool", &format!("@{}", file.display())]).done();
    assert_eq!(by_file.text().lines().count(), 3);
    // The store 'default' lies on all three nodes.
    let with_pool = |arguments: &[&str]| farside([arguments, &["--pool", &pool]].concat());
    with_pool(&["kv", "put", "greeting", "hello"]).done();
    assert_eq!(with_pool(&["kv", "get", "greeting"]).done().text(), "hello");
    let records: String = (0..300).map(|n| format!("key-{n}\tvalue-{n}\n")).collect();
    let (from, dumped) = (folder.path().join("records.tsv"), folder.path().join("dumped.tsv"));
    std::fs::write(&from, &records).expect("a file");
    with_pool(&["kv", "load", &from.display().to_string()]).done();
    with_pool(&["kv", "dump", &dumped.display().to_string()]).done();
    // A dump of three nodes loads into one, and a dump of that one into three.
    let one = urls[1].as_str();
    farside(["kv", "load", &dumped.display().to_string(), "--pool", one, "--store", "extra"]).done();
    let again = folder.path().join("again.tsv");
    farside(["kv", "dump", &again.display().to_string(), "--pool", one, "--store", "extra"]).done();
    let sorted = |path: &std::path::Path| {
        let text = std::fs::read_to_string(path).expect("a dump");
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&dumped).len(), 301);
    assert_eq!(sorted(&dumped), sorted(&again));
    with_pool(&["store", "create", "second", "--quota", "6MiB"]).done();
    with_pool(&["kv", "load", &again.display().to_string(), "--store", "second"]).done();
    let stat = with_pool(&["kv", "stat", "--json", "--store", "second"]).done();
    let stat: serde_json::Value = serde_json::from_str(stat.text()).expect("JSON");
    let live = |stat: &serde_json::Value| stat["live_buffers"].as_u64().expect("a number");
    assert_eq!(live(&stat), 301);
    let members = stat["members"].as_array().expect("members");
    assert!(members.len() == 3 && members.iter().all(|member| live(member) > 50), "{stat}");
    assert!(with_pool(&["kv", "stat", "--store", "second"]).done().text().contains("member 2"));
    with_pool(&["store", "rebuild", "second"]).done();
    with_pool(&["store", "drop", "second"]).done();
    with_pool(&["kv", "get", "k", "--store", "second"]).refused("there is no store 'second'");
    with_pool(&["store", "create", "plain", "--kind", "raw", "--quota", "2MiB"])
        .refused("create it with --members 1");
    with_pool(&["store", "create", "plain", "--kind", "raw", "--quota", "2MiB", "--members", "1"]).done();
    with_pool(&["store", "create", "wide", "--quota", "6MiB", "--members", "4"])
        .refused("give --members from 1 to 3");
    with_pool(&["store", "drop", "plain"]).done();
    let shell = farside(["shell", "--pool", &pool, "get", "key-7"]);
    assert!(shell.err.is_empty(), "{}", shell.err);
    farside(["kv", "get", "k", "--pool", one]).refused("name all of its nodes in --pool");

    rustix::process::kill_process(pids[2], Signal::KILL).expect("it lives");
    until("the exit is reported", || up.log().contains("node 2 at"));
    let ran = farside(["info", "--json", "--pool", &pool]);
    let lines: Vec<serde_json::Value> = String::from_utf8_lossy(&ran.out)
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(lines.iter().filter(|info| info["error"].is_null()).count(), 2, "{lines:?}");
    assert!(lines[2]["error"].is_string(), "{lines:?}");
    assert!(ran.err.contains("1 of 3 nodes did not answer, or refused"), "{}", ran.err);
    // Only the keys of the dead node fail, with an error that names it.
    let gets: Vec<_> = (0..40).map(|n| with_pool(&["kv", "get", &format!("key-{n}")])).collect();
    let (served, failed): (Vec<_>, Vec<_>) = gets.iter().partition(|get| get.err.is_empty());
    assert!(served.len() > 15 && failed.len() > 3, "{} served, {} failed", served.len(), failed.len());
    assert!(failed.iter().all(|get| get.err.contains("node 2")), "{}", failed[0].err);
    let doctor = farside(["doctor", "--pool", &pool]);
    assert!(doctor.err.contains("not all nodes can be reached"), "{}", doctor.err);

    up.signal(Signal::INT);
    assert_eq!(up.ended(), Some(0));
    let left: Vec<_> = std::fs::read_dir(folder.path()).expect("a folder").flatten().collect();
    // A killed node leaves its socket; the others remove theirs.
    let left: Vec<_> = left
        .iter()
        .map(|entry| entry.file_name())
        .filter(|name| name.to_string_lossy().contains("sock"))
        .collect();
    assert_eq!(left, ["pool-2.sock"]);
}

#[test]
fn up_ends_all_nodes_if_one_does_not_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("pool.sock");
    std::fs::write(folder.path().join("pool-1.sock"), "a file in the way").expect("a file");
    let ran = farside([
        OsStr::new("up"),
        OsStr::new("--nodes"),
        OsStr::new("3"),
        OsStr::new("--socket"),
        socket.as_os_str(),
    ]);
    assert!(ran.err.contains("pool-1.sock did not start"), "{}", ran.err);
    assert!(ran.err.contains("the other nodes were stopped"), "{}", ran.err);
    let left: Vec<_> = std::fs::read_dir(folder.path()).expect("a folder").flatten().collect();
    assert_eq!(left.iter().map(|entry| entry.file_name()).collect::<Vec<_>>(), ["pool-1.sock"]);
}
