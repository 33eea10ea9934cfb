//! Pools whose nodes etcd lists, with the etcd of this machine, if there is one.

use crate::support::{Process, Ran, command, farside, run, serve, until};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Returns the path of a program in PATH.
fn installed(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Starts etcd with its data in `folder`. Returns it with its host and port.
fn etcd(folder: &Path) -> Option<(Process, String)> {
    let Some(program) = installed("etcd") else {
        println!("skipped: etcd is not installed: try 'apt-get install etcd-server'");
        return None;
    };
    let port = || {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        taken.local_addr().expect("an address").port()
    };
    // Another process may take a port before etcd does.
    for attempt in 0..5 {
        let (client, peer) = (format!("127.0.0.1:{}", port()), format!("http://127.0.0.1:{}", port()));
        let url = format!("http://{client}");
        let mut etcd = Command::new(&program);
        etcd.arg("--data-dir").arg(folder.join(format!("data-{attempt}")));
        etcd.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
        etcd.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        etcd.args(["--initial-cluster", &format!("default={peer}")]);
        let mut etcd = Process::start(etcd, folder.join(format!("etcd-{attempt}")));
        let mut has_exited = false;
        until("etcd answers or exits", || {
            has_exited = etcd.has_ended();
            has_exited || put(&client, "/test", "1")
        });
        if !has_exited {
            return Some((etcd, client));
        }
    }
    panic!("etcd did not start: {}", folder.display());
}

/// Puts a key by etcd's JSON gateway. Returns whether etcd did so.
fn put(at: &str, key: &str, value: &str) -> bool {
    use base64::Engine;
    use std::io::{Read, Write};
    let base64 = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    let body = serde_json::json!({ "key": base64(key), "value": base64(value) }).to_string();
    let Ok(mut stream) = std::net::TcpStream::connect(at) else { return false };
    let head =
        format!("POST /v3/kv/put HTTP/1.0\r\nHost: {at}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let mut answer = Vec::new();
    stream.write_all(head.as_bytes()).is_ok()
        && stream.read_to_end(&mut answer).is_ok()
        && answer.starts_with(b"HTTP/1.0 200")
}

#[test]
fn etcd_lists_the_nodes_and_its_end_stops_no_client() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some((mut etcd, at)) = etcd(folder.path()) else { return };
    let nodes: Vec<Process> = (0..2)
        .map(|number| {
            let socket = folder.path().join(format!("node-{number}.sock"));
            let node = serve(&socket, &["--memory", "32MiB"], folder.path().join(format!("log-{number}")));
            node.line();
            node
        })
        .collect();
    let url = |number: u32| format!("shm:{}", folder.path().join(format!("node-{number}.sock")).display());
    // The first endpoint answers no one.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let dead = silent.local_addr().expect("an address");
    let pool = format!("etcd://{dead},{at}/farside/test");
    let state = folder.path().join("state");
    let with_pool = |arguments: &[&str]| -> Ran {
        let mut command = command();
        command.env("XDG_STATE_HOME", &state).args(arguments).args(["--pool", &pool]);
        run(command, b"")
    };
    with_pool(&["info"]).refused("etcd has no key below '/farside/test/'");
    assert!(put(&at, "/farside/test/a", &url(0)));
    assert!(put(&at, "/farside/test/b", &format!("url = \"{}\"\n", url(1))));
    assert!(put(&at, "/farside/testing", "a key that is not below the prefix"));
    assert_eq!(with_pool(&["info", "--json"]).done().text().lines().count(), 2);
    with_pool(&["store", "create", "default", "--quota", "8MiB"]).done();
    with_pool(&["kv", "put", "greeting", "hello"]).done();
    let by_list = farside(["kv", "get", "greeting", "--pool", &format!("{},{}", url(0), url(1))]).done();
    assert_eq!(by_list.text(), "hello");
    assert!(with_pool(&["doctor"]).done().text().contains("All nodes can be reached."));

    // A value that is no node is an error, also if there is an earlier list.
    assert!(put(&at, "/farside/test/c", "url = 7"));
    with_pool(&["info"]).refused("the value of the key '/farside/test/c' in etcd is invalid");
    assert!(put(&at, "/farside/test/c", "local:"));
    with_pool(&["info"]).refused("is not the url of a node that others can reach");
    assert!(put(&at, "/farside/test/c", &format!("shm:{}/none", folder.path().display())));
    let shown = with_pool(&["info"]);
    assert!(shown.err.contains("1 of 3 nodes"), "{}", shown.err);

    // A client that runs while etcd ends.
    let mut shell = command();
    shell.env("XDG_STATE_HOME", &state).args(["shell", "--pool", &pool]);
    shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut shell = shell.spawn().expect("it starts");
    let mut input = shell.stdin.take().expect("piped");
    let mut output = std::io::BufReader::new(shell.stdout.take().expect("piped"));
    let mut said = |line: &str| {
        use std::io::{BufRead, Write};
        input.write_all(line.as_bytes()).expect("the shell reads");
        let mut answer = String::new();
        output.read_line(&mut answer).expect("the shell answers");
        answer
    };
    assert_eq!(said("get greeting\n").trim_end(), "hello");
    etcd.kill();
    assert_eq!(said("get greeting\n").trim_end(), "hello");
    drop(input);
    assert!(shell.wait().expect("a child").success());

    // A new client starts from the last list, and says so.
    let ran = with_pool(&["kv", "get", "greeting"]).done();
    assert_eq!(ran.text(), "hello");
    assert!(ran.err.contains("etcd does not answer"), "{}", ran.err);
    assert!(ran.err.contains("using the 3 nodes that it listed last"), "{}", ran.err);
    assert!(ran.err.contains(&dead.to_string()) && ran.err.contains(&at), "both are named: {}", ran.err);
    let mut elsewhere = command();
    elsewhere.env("XDG_STATE_HOME", folder.path().join("other")).args(["info", "--pool", &pool]);
    run(elsewhere, b"").refused("no earlier list of nodes can be used");
    run(
        {
            let mut bare = command();
            bare.args(["info", "--pool", &pool]);
            bare
        },
        b"",
    )
    .refused("neither XDG_STATE_HOME nor HOME is set");
    drop(nodes);
}
