//! Requests that cannot be served over the device: each error names the failure and the remedy.

use super::{Resources, device, node};
use crate::support::{command, farside, run};
use std::os::unix::fs::PermissionsExt;

#[test]
#[ignore = "takes an RDMA device: cargo xtask verbs"]
fn a_device_a_port_or_an_address_that_is_missing_is_named() {
    let refused = |listen: &str, reason: &str| {
        let arguments =
            ["serve", "--memory", "16MiB", "--socket", "/tmp/farside-refused.sock", "--listen", listen];
        farside(arguments).refused(reason);
    };
    refused("verbs://farside-none?host=127.0.0.1", "farside-none");
    refused(&format!("verbs://{}:0?gid=99&host=127.0.0.1", device()), "no GID 99; it has");
}

/// A limit on locked memory that a node of 64 MiB exceeds, as a user without privileges meets it.
#[test]
#[ignore = "takes an RDMA device: cargo xtask verbs"]
fn the_limit_on_locked_memory_is_named_with_the_remedy() {
    let before = Resources::now();
    let limited = |arguments: &[&str]| {
        let mut command = std::process::Command::new("prlimit");
        command.args(["--memlock=1048576", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
        command
            .args(["--bounding-set=-all", "--inh-caps=-all", env!("CARGO_BIN_EXE_farside")])
            .args(arguments);
        command.env_clear().env("TMPDIR", "/tmp").env("PATH", "/usr/bin:/bin");
        run(command, b"")
    };
    let listen = format!("verbs://{}:0?host=127.0.0.1", device());
    let socket = std::env::temp_dir().join(format!("farside-memlock-{}.sock", std::process::id()));
    let socket = socket.display().to_string();
    let ran = limited(&["serve", "--memory", "64MiB", "--socket", &socket, "--listen", &listen]);
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    assert!(ran.err.contains("cannot register") && ran.err.contains("ulimit -l"), "{}", ran.err);
    println!("{}", ran.err);
    before.are_back();
}

#[test]
#[ignore = "takes an RDMA device: cargo xtask verbs"]
fn a_token_is_checked_before_a_queue_pair_serves() {
    let folder = tempfile::tempdir().expect("a folder");
    let secret = folder.path().join("secret").display().to_string();
    let made =
        farside(["token", "new", "--name", "a", "--store", "*=all", "--admin", "--secret-file", &secret])
            .done();
    let tokens = folder.path().join("tokens.toml");
    let write = |path: &std::path::Path, text: &str| {
        std::fs::write(path, text).expect("written");
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("a file of the test");
    };
    write(&tokens, made.text());
    let tokens = tokens.display().to_string();
    let node = node(super::Atomic::Nic, &["--memory", "32MiB", "--tokens", &tokens, "--shm-trusts-all"]);
    let before = Resources::now();
    let url = node.listening();
    let file = folder.path().join("wrong");
    write(&file, "wrong");
    let with = |file: &std::path::Path| {
        let mut info = command();
        info.args(["info", "--pool", &url, "--token-file"]).arg(file);
        run(info, b"")
    };
    with(secret.as_ref()).done();
    with(&file).refused("does not know this token");
    super::at(&url, &["info"]).refused("token");
    before.are_back();
}
