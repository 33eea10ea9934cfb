//! Settings: the precedence of their sources, and the invalid ones that are refused.

use crate::support::{command, farside, run};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

#[test]
fn flags_override_variables_which_override_the_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("settings.toml");
    std::fs::write(&file, "pool = 'shm:/file'\nstore = 'filed'\ntoken_file = '/filed'\ntls_ca = '/certs'\n")
        .expect("a file");
    let told_by = |flags: &[&str], variables: &[(&str, &OsStr)], name: &str| {
        let mut command = command();
        command.envs(variables.iter().copied()).args(["info", "--config", "--json"]).args(flags);
        let ran = run(command, b"").done();
        let reported: serde_json::Value = serde_json::from_slice(&ran.out).expect("one object");
        let text = |field: &str| match &reported[name][field] {
            Value::Null => "none".to_owned(),
            value => value.as_str().expect("text").to_owned(),
        };
        (text("value"), text("origin"))
    };
    let reported = |flags: &[&str], variables: &[(&str, &OsStr)]| {
        ["pool", "store"].map(|name| told_by(flags, variables, name))
    };
    let pair = |value: &str, origin: &str| (value.to_owned(), origin.to_owned());
    let (config, path) = (("FARSIDE_CONFIG", file.as_os_str()), file.display().to_string());
    let all = [config, ("FARSIDE_POOL", OsStr::new("shm:/v")), ("FARSIDE_STORE", OsStr::new("named"))];
    assert_eq!(
        reported(&["--pool", "shm:/f", "--store", "flagged"], &all),
        [pair("shm:/f", "flag"), pair("flagged", "flag")]
    );
    assert_eq!(reported(&[], &all), [pair("shm:/v", "FARSIDE_POOL"), pair("named", "FARSIDE_STORE")]);
    assert_eq!(reported(&[], &[config]), [pair("shm:/file", &path), pair("filed", &path)]);
    let [pool, store] = reported(&[], &[("XDG_RUNTIME_DIR", OsStr::new("/run/me"))]);
    assert_eq!(
        (pool, store),
        (pair("shm:/run/me/farside/default.sock", "built in"), pair("default", "built in"))
    );
    let home = folder.path().join(".config/farside");
    std::fs::create_dir_all(&home).expect("a folder");
    std::fs::write(home.join("config.toml"), "store = 'mine'").expect("a file");
    assert_eq!(reported(&[], &[("HOME", folder.path().as_os_str())])[1].0, "mine");
    // The path of the token's file is shown, and never the token.
    let token_file = |flags: &[&str], variables: &[(&str, &OsStr)]| told_by(flags, variables, "token_file");
    let shown = OsStr::new("/shown");
    assert_eq!(
        token_file(&["--token-file", "/f"], &[config, ("FARSIDE_TOKEN_FILE", shown)]),
        pair("/f", "flag")
    );
    assert_eq!(
        token_file(&[], &[config, ("FARSIDE_TOKEN_FILE", shown)]),
        pair("/shown", "FARSIDE_TOKEN_FILE")
    );
    assert_eq!(token_file(&[], &[config]), pair("/filed", &path));
    assert_eq!(token_file(&[], &[]), pair("none", "built in"));
    let tls_ca = |flags: &[&str], variables: &[(&str, &OsStr)]| told_by(flags, variables, "tls_ca");
    let both = [config, ("FARSIDE_TLS_CA", shown)];
    assert_eq!(tls_ca(&["--tls-ca", "/f"], &both), pair("/f", "flag"));
    assert_eq!(tls_ca(&[], &both), pair("/shown", "FARSIDE_TLS_CA"));
    assert_eq!(tls_ca(&[], &[config]), pair("/certs", &path));
    assert_eq!(tls_ca(&[], &[]), pair("none", "built in"));
    // An empty variable counts as not set.
    assert_eq!(reported(&[], &[("FARSIDE_STORE", OsStr::new(""))])[1], pair("default", "built in"));
}

#[test]
fn bad_settings_are_refused_and_unknown_ones_cause_a_warning() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("settings.toml");
    let with = |name: &str, value: &OsStr| {
        let mut command = command();
        command.env(name, value).args(["info", "--config"]);
        run(command, b"")
    };
    let warned = with("FARSIDE_POOOL", OsStr::new("x")).done();
    assert!(warned.err.contains("unknown variable FARSIDE_POOOL"), "{}", warned.err);
    assert!(warned.err.contains("FARSIDE_POOL, FARSIDE_STORE"), "{}", warned.err);
    for text in ["pool = 5", "poool = 'x'", "pool = 'unended", "[pool]", "\u{0}"] {
        std::fs::write(&file, text).expect("a file");
        with("FARSIDE_CONFIG", file.as_os_str())
            .refused("is not a valid settings file")
            .refused("may set pool, store, token_file and tls_ca");
    }
    std::fs::write(&file, b"pool = '\xff'").expect("a file");
    with("FARSIDE_CONFIG", file.as_os_str()).refused("could not read the settings").refused("FARSIDE_CONFIG");
    with("FARSIDE_CONFIG", OsStr::new("/nowhere/file")).refused("could not read the settings");
    with("FARSIDE_CONFIG", folder.path().as_os_str()).refused("could not read the settings");
    std::fs::write(&file, "store = 's'\n\npol = 'x'\n").expect("a file");
    with("FARSIDE_CONFIG", file.as_os_str())
        .refused("line 3: unknown field `pol`")
        .refused("`pool`, `store`, `token_file`, `tls_ca`");
    // A device is not read: it may have no end.
    with("FARSIDE_CONFIG", OsStr::new("/dev/zero")).refused("name a regular file");
    with("FARSIDE_POOL", OsStr::from_bytes(b"shm:/\xff")).refused("not UTF-8").refused("unset it");
}

#[test]
fn settings_printed_as_a_file_yield_the_same_settings() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("settings.toml");
    let shown = |variables: &[(&str, &OsStr)], flags: &[&str], form: &str| {
        let mut command = command();
        command.envs(variables.iter().copied()).args(["info", "--config", "--format", form]).args(flags);
        run(command, b"").done()
    };
    let values = |ran: crate::support::Ran| {
        ["pool", "store", "token_file", "tls_ca"].map(|name| ran.json()[name]["value"].clone())
    };
    let odd = "shm:/it's \"a\" path # with\nlines\\ and = signs";
    let strange = folder.path().join("a\nb.toml");
    std::fs::write(&strange, "tls_ca = '/certs'").expect("a file");
    let named = [("FARSIDE_STORE", OsStr::new("named"))];
    let filed = [("FARSIDE_CONFIG", strange.as_os_str())];
    for (variables, flags) in
        [(&[][..], &[][..]), (&named, &["--pool", odd]), (&filed, &["--token-file", "/\u{1}secret"])]
    {
        let dumped = shown(variables, flags, "toml");
        std::fs::write(&file, &dumped.out).expect("a file");
        let again = shown(&[("FARSIDE_CONFIG", file.as_os_str())], &[], "json");
        assert_eq!(values(again), values(shown(variables, flags, "json")), "{}", dumped.text());
    }
    let dumped = shown(&[("FARSIDE_STORE", OsStr::new("named"))], &["--pool", "shm:/x"], "toml");
    let expected = "pool = \"shm:/x\"  # flag\nstore = \"named\"  # FARSIDE_STORE\n\
                    # token_file is not set\n# tls_ca is not set\n";
    assert!(dumped.text().ends_with(expected), "{}", dumped.text());
    farside(["info", "--format", "toml"]).refused("--config");
    farside(["info", "--config", "--format", "toml", "--json"]).refused("cannot be used with");
    farside(["info", "--config", "--format", "xml"]).refused("text, json, toml");
}

#[test]
fn the_settings_file_and_built_in_values_are_shown_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let reported = |variables: &[(&str, &OsStr)], flags: &[&str], name: &str| {
        let mut command = command();
        command.envs(variables.iter().copied()).args(["info", "--config", "--json"]).args(flags);
        let reported = run(command, b"").done().json()[name].clone();
        (reported["value"].clone(), reported["origin"].as_str().expect("text").to_owned())
    };
    let home = ("HOME", folder.path().as_os_str());
    let usual = folder.path().join(".config/farside/config.toml").display().to_string();
    assert_eq!(reported(&[], &[], "config"), (Value::Null, "built in".into()));
    assert_eq!(reported(&[home], &[], "config"), (json!(usual), "HOME, missing".into()));
    std::fs::create_dir_all(folder.path().join(".config/farside")).expect("a folder");
    std::fs::write(&usual, "").expect("a file");
    assert_eq!(reported(&[home], &[], "config"), (json!(usual), "HOME, read".into()));
    assert_eq!(
        reported(&[("XDG_CONFIG_HOME", OsStr::new("/x")), home], &[], "config").1,
        "XDG_CONFIG_HOME, missing"
    );
    let named = OsStr::new(&usual);
    assert_eq!(
        reported(&[("FARSIDE_CONFIG", named)], &[], "config"),
        (json!(usual), "FARSIDE_CONFIG, read".into())
    );
    assert_eq!(
        reported(&[("XDG_RUNTIME_DIR", OsStr::new("/run/me"))], &[], "socket"),
        (json!("/run/me/farside/default.sock"), "XDG_RUNTIME_DIR".into())
    );
    assert_eq!(reported(&[], &[], "socket").1, "built in");
    assert_eq!(reported(&[], &[], "insecure_udp"), (json!(false), "built in".into()));
    assert_eq!(reported(&[], &["--insecure-udp"], "insecure_udp"), (json!(true), "flag".into()));
    assert_eq!(reported(&[], &[], "data_port"), (json!(7460), "built in".into()));
    assert_eq!(reported(&[], &[], "admin"), (json!("127.0.0.1:7400"), "built in".into()));
}
