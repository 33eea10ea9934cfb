//! TLS: certificates, which clients trust them, and the errors if one side does not speak TLS.

use crate::support::{Process, Ran, command, farside, run, serve};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A node that serves TLS and TCP. Its certificate is `cert.pem` in its folder, for 127.0.0.1.
struct TlsNode {
    node: Process,
    tls: String,
    tcp: String,
    folder: TempDir,
}

impl TlsNode {
    fn start() -> TlsNode {
        let folder = tempfile::tempdir().expect("a folder");
        make(folder.path(), &["--host", "127.0.0.1"]).done();
        TlsNode::with(folder)
    }

    /// Starts a node with the certificate and key in a folder.
    fn with(folder: TempDir) -> TlsNode {
        let [cert, key] = ["cert.pem", "key.pem"].map(|name| text(&folder.path().join(name)));
        let node = serve(
            &folder.path().join("node.sock"),
            &[
                "--memory",
                "16MiB",
                "--store",
                "default",
                "--listen",
                "tls://127.0.0.1:0",
                "--listen",
                "tcp://127.0.0.1:0",
                "--tls-cert",
                &cert,
                "--tls-key",
                &key,
            ],
            folder.path().join("log"),
        );
        node.line();
        let [tls, tcp] = [node.line(), node.line()]
            .map(|line| line.split_once(" at ").unwrap_or_else(|| panic!("no url in '{line}'")).1.to_owned());
        assert!(tls.starts_with("tls://127.0.0.1:") && tcp.starts_with("tcp://"), "{tls} {tcp}");
        TlsNode { node, tls, tcp, folder }
    }

    fn certificate(&self) -> String {
        text(&self.folder.path().join("cert.pem"))
    }
}

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

/// Creates a certificate and its key in a folder.
fn make(folder: &Path, more: &[&str]) -> Ran {
    farside([&["tls", "new", "--out", &text(folder)], more].concat())
}

fn info(url: &str, certificates: &str) -> Ran {
    farside(["info", "--pool", url, "--tls-ca", certificates])
}

#[test]
fn what_tls_new_prints_serves_a_node_and_reaches_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let made = make(&folder.path().join("new"), &["--host", "127.0.0.1", "--host", "localhost"]).done();
    let [cert, key] = ["new/cert.pem", "new/key.pem"].map(|name| folder.path().join(name));
    let mode = |path: &PathBuf| std::fs::metadata(path).expect("it exists").permissions().mode() & 0o777;
    assert_eq!((mode(&cert), mode(&key)), (0o644, 0o600));
    let secret = std::fs::read_to_string(&key).expect("it exists");
    assert!(!made.text().contains(secret.lines().nth(1).expect("a key")), "the key is printed");
    let printed = |begins: &str| -> Vec<String> {
        let line = made.text().lines().find(|line| line.trim().starts_with(begins));
        let line = line.unwrap_or_else(|| panic!("no '{begins}' in {}", made.text()));
        line.replace(":7460", ":0").split_whitespace().skip(1).map(str::to_owned).collect()
    };
    let mut serve = command();
    serve.arg("serve").args(["--die-with-parent", "--memory", "16MiB", "--socket"]);
    serve.arg(folder.path().join("node.sock")).args(&printed("farside serve")[1..]);
    let node = Process::start(serve, folder.path().join("log"));
    node.line();
    let line = node.line();
    let url = line.split_once(" at ").expect("a url").1;
    // The printed port is replaced by the one that the system chose.
    let client: Vec<String> = printed("farside kv put").into_iter().collect();
    let client = client.iter().map(|word| if word.starts_with("tls://") { url } else { word });
    farside(client).done();
    let mut by_name = command();
    by_name.env("FARSIDE_TLS_CA", &cert).args(["kv", "get", "greeting", "--pool"]);
    by_name.arg(url.replace("127.0.0.1", "localhost"));
    assert_eq!(run(by_name, b"").done().out, b"hello");
    let settings = folder.path().join("settings.toml");
    let lines = format!("pool = '{url}'\ntls_ca = '{}'\n", cert.display());
    std::fs::write(&settings, lines).expect("a file");
    let mut settled = command();
    settled.env("FARSIDE_CONFIG", &settings).args(["kv", "get", "greeting"]);
    assert_eq!(run(settled, b"").done().out, b"hello");
}

#[test]
fn a_node_with_an_untrusted_certificate_is_refused() {
    let node = TlsNode::start();
    info(&node.tls, &node.certificate()).done();
    farside(["info", "--pool", &node.tls]).refused("--tls-ca").refused("FARSIDE_TLS_CA");
    let other = tempfile::tempdir().expect("a folder");
    make(other.path(), &["--host", "127.0.0.1"]).done();
    let others = text(&other.path().join("cert.pem"));
    info(&node.tls, &others).refused("certificate is not trusted").refused("--tls-ca");
    // Of several it takes one.
    let both = other.path().join("both.pem");
    let texts = [&others, &node.certificate()].map(|path| std::fs::read_to_string(path).expect("a file"));
    std::fs::write(&both, texts.concat()).expect("a file");
    info(&node.tls, &text(&both)).done();
    info(&node.tls.replace("127.0.0.1", "localhost"), &node.certificate())
        .refused("is not for 'localhost'")
        .refused("127.0.0.1")
        .refused("farside tls new --host localhost");
}

/// Creates a self-signed certificate and its key. The certificate is valid from the start of one year to the start of
/// another.
fn valid(folder: &Path, from: i32, until: i32) {
    let mut params = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).expect("an address");
    params.not_before = rcgen::date_time_ymd(from, 1, 1);
    params.not_after = rcgen::date_time_ymd(until, 1, 1);
    let key = rcgen::KeyPair::generate().expect("a key");
    let certificate = params.self_signed(&key).expect("a certificate");
    std::fs::write(folder.join("cert.pem"), certificate.pem()).expect("a file");
    std::fs::write(folder.join("key.pem"), key.serialize_pem()).expect("a file");
    let private = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(folder.join("key.pem"), private).expect("a file of the test");
}

#[test]
fn a_certificate_outside_of_its_period_is_refused() {
    for (from, until, reason) in [(2000, 2001, "has expired"), (4000, 4001, "not valid yet")] {
        let folder = tempfile::tempdir().expect("a folder");
        valid(folder.path(), from, until);
        let node = TlsNode::with(folder);
        info(&node.tls, &node.certificate()).refused(reason).refused("clock");
    }
}

/// The error names the protocol that the server speaks, and no client waits without a deadline.
#[test]
fn mixing_up_tls_and_tcp_is_reported() {
    let node = TlsNode::start();
    let (plain, tls) = (node.tls.replace("tls:", "tcp:"), node.tcp.replace("tcp:", "tls:"));
    farside(["info", "--pool", &plain]).refused("speaks TLS").refused("tls:// in place of tcp://");
    info(&tls, &node.certificate()).refused("hung up").refused("tcp://");
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("tls://{}", silent.local_addr().expect("an address"));
    info(&url, &node.certificate()).refused("no node answered within");
    drop(silent);
    info(&url, &node.certificate()).refused("no node can be reached");
    let talker = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("tls://{}", talker.local_addr().expect("an address"));
    std::thread::spawn(move || {
        let (mut stream, _) = talker.accept().expect("a client");
        let _unread = std::io::Write::write_all(&mut stream, b"220 mail ready\r\n");
        let _until_it_leaves = std::io::Read::read_to_end(&mut stream, &mut Vec::new());
    });
    info(&url, &node.certificate()).refused("does not speak TLS");
    info(&node.tls, &node.certificate()).done();
    assert!(!node.node.log().contains("ERROR"), "{}", node.node.log());
}

#[test]
fn unusable_certificates_and_keys_are_refused_with_a_remedy() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| text(&folder.path().join(name));
    make(folder.path(), &["--host", "127.0.0.1"]).done();
    make(&folder.path().join("other"), &["--host", "127.0.0.1"]).done();
    let (cert, key) = (at("cert.pem"), at("key.pem"));
    std::fs::write(at("empty"), "").expect("a file");
    std::fs::write(at("torn"), "-----BEGIN CERTIFICATE-----\nAAAA").expect("a file");
    std::fs::write(at("junk"), "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
        .expect("a file");
    std::fs::write(at("binary"), [0xff, 0xfe, 0]).expect("a file");
    for name in ["empty", "torn", "binary"] {
        std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(0o600))
            .expect("a file of the test");
    }
    std::fs::copy(&key, at("open.pem")).expect("a file");
    std::fs::set_permissions(at("open.pem"), std::fs::Permissions::from_mode(0o640))
        .expect("a file of the test");
    rustix::fs::mkfifoat(rustix::fs::CWD, at("pipe"), rustix::fs::Mode::RUSR).expect("a pipe");
    let serve = ["serve", "--memory", "8MiB", "--socket", &at("node.sock")];
    let tls = ["--listen", "tls://127.0.0.1:0"];
    let shown = |cert: &str, key: &str, reason: &str| {
        farside([&serve[..], &tls, &["--tls-cert", cert, "--tls-key", key]].concat()).refused(reason)
    };
    shown(&at("absent"), &key, "could not read").refused("absent");
    shown(&at("pipe"), &key, "not a file of certificates");
    shown(&at("empty"), &key, "holds no certificate");
    shown(&key, &key, "holds no certificate").refused("key.pem");
    shown(&at("torn"), &key, "is not valid PEM");
    shown(&at("junk"), &key, "cannot be used");
    shown(&at("binary"), &key, "could not read");
    shown(&cert, &at("absent"), "could not read").refused("absent");
    shown(&cert, &at("pipe"), "not a file of secrets");
    shown(&cert, &at("open.pem"), "chmod 600").refused("open.pem");
    shown(&cert, &cert, "chmod 600");
    shown(&cert, &at("empty"), "holds no private key");
    shown(&cert, &at("other/key.pem"), "is not the key to the certificate").refused("other/key.pem");
    farside([&serve[..], &tls].concat()).refused("--tls-cert and --tls-key").refused("farside tls new");
    farside([&serve[..], &tls, &["--tls-cert", &cert]].concat()).refused("--tls-key");
    farside([&serve[..], &tls, &["--tls-key", &key]].concat()).refused("--tls-cert");
    let plain = ["--listen", "tcp://127.0.0.1:0", "--tls-cert", &cert, "--tls-key", &key];
    farside([&serve[..], &plain].concat()).refused("no --listen tls://");
    farside([&serve[..], &["--tls-cert", &cert, "--tls-key", &key]].concat()).refused("--listen");
    farside([&serve[..], &["--listen", "tls://localhost"]].concat()).refused("an address and a port");
    // As for TCP, tokens are required off loopback.
    let open = ["--listen", "tls://0.0.0.0:0", "--tls-cert", &cert, "--tls-key", &key];
    farside([&serve[..], &open].concat()).refused("--tokens");
    let url = "tls://127.0.0.1:1";
    info(url, &at("absent")).refused("could not read").refused("absent");
    info(url, &at("pipe")).refused("not a file of certificates");
    info(url, &at("empty")).refused("holds no certificate");
    info(url, &at("torn")).refused("is not valid PEM");
    info(url, &at("junk")).refused("cannot be used");
    info(url, &at("")).refused("not a file of certificates");
    info("tls://not a host:1", &cert).refused("check the host's name");
}

#[test]
fn invalid_hosts_get_no_certificate_and_no_file_is_overwritten() {
    let folder = tempfile::tempdir().expect("a folder");
    for host in ["", "a b", "tls://node", "node:7460", "-"] {
        make(folder.path(), &["--host", host])
            .refused("not a host name or address")
            .refused("without scheme");
    }
    make(folder.path(), &[]).refused("--host");
    make(folder.path(), &["--host", "node", "--days", "0"]).refused("--days");
    assert_eq!(std::fs::read_dir(folder.path()).expect("a file of the test").count(), 0);
    let made = make(folder.path(), &["--host", "node.example"]).done();
    assert!(made.text().contains("tls://node.example:7460") && made.text().contains("--tokens"));
    assert!(make(&folder.path().join("6"), &["--host", "::1"]).done().text().contains("tls://[::1]:7460"));
    let read = |name: &str| std::fs::read(folder.path().join(name)).expect("it was created");
    let before = [read("cert.pem"), read("key.pem")];
    make(folder.path(), &["--host", "node.example"]).refused("could not write").refused("another folder");
    std::fs::remove_file(folder.path().join("key.pem")).expect("a file of the test");
    make(folder.path(), &["--host", "node.example"]).refused("cert.pem");
    assert!(!folder.path().join("key.pem").exists(), "a key without its certificate is left behind");
    assert_eq!(read("cert.pem"), before[0]);
    make(&folder.path().join("cert.pem"), &["--host", "node"]).refused("could not create");
}
