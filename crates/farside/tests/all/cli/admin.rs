//! Tests of a node's admin endpoint, which serves metrics, health and stores over HTTP.

use crate::support::{Process, farside, serve, until};
use std::ffi::OsStr;
use std::io::Write;

/// Starts a node with an HTTP endpoint. Returns it and the endpoint's address.
fn watched(folder: &std::path::Path, token: &[u8]) -> (Process, String) {
    let file = folder.join("token");
    std::fs::write(&file, token).expect("a file");
    let token = ["--admin-token-file", file.to_str().expect("UTF-8")];
    let arguments = [&["--memory", "8MiB", "--admin", "127.0.0.1:0"], &token[..]].concat();
    let node = serve(&folder.join("node.sock"), &arguments, folder.join("log"));
    node.line();
    let line = node.line();
    let at = line.split_once("http://").and_then(|(_, rest)| rest.split_once("/{health,stores,metrics}"));
    (node, at.expect("a url with the real port").0.to_owned())
}

pub(crate) fn answer_to(at: &str, question: &str) -> String {
    let mut stream = std::net::TcpStream::connect(at).expect("it listens");
    stream.set_read_timeout(Some(crate::support::PATIENCE)).expect("a timeout");
    stream.write_all(question.as_bytes()).expect("it reads the request");
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut stream, &mut answer).expect("it responds and closes the connection");
    answer
}

#[test]
fn idle_connections_are_few_and_are_closed() {
    let folder = tempfile::tempdir().expect("a folder");
    let (node, at) = watched(folder.path(), b"secret\n");
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", node.pid())).expect("it runs").count();
    let before = descriptors();
    let mut idle: Vec<_> = (0..200).map(|_| std::net::TcpStream::connect(&at).expect("it listens")).collect();
    for stream in &mut idle[..20] {
        stream.write_all(b"GET /health HTTP/1.1\r\nHost:").expect("it reads a part");
    }
    until("some are accepted", || descriptors() > before);
    assert!(descriptors() <= before + 40, "{} descriptors for 200 connections", descriptors() - before);
    drop(idle.split_off(20));
    // The idle connections that remain are closed. A complete request gets a response.
    let question =
        "GET /health HTTP/1.1\r\nHost: n\r\nAuthorization: bearer secret\r\nConnection: close\r\n\r\n";
    assert!(answer_to(&at, question).contains("200 OK"));
    until("they are closed", || descriptors() <= before);
    let question = question.replace("secret", "Secret");
    assert!(answer_to(&at, &question).contains("401 Unauthorized"));
}

#[test]
fn a_token_that_no_client_could_send_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, socket) = (folder.path().join("token"), folder.path().join("node.sock"));
    for token in [&b""[..], b"\n", b"two words", b"two\nlines", "ключ".as_bytes(), b"\xff", b"\x01"] {
        std::fs::write(&file, token).expect("a file");
        let arguments = ["serve", "--memory", "8MiB", "--admin", "127.0.0.1:0", "--admin-token-file"];
        let arguments = arguments.map(OsStr::new).into_iter();
        let arguments = arguments.chain([file.as_os_str(), "--socket".as_ref(), socket.as_os_str()]);
        farside(arguments).refused("holds no token: put one");
    }
}
