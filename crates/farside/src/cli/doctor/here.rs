//! Checks this user's settings, secrets and default socket, and finds installed programs to compare with.
//!
//! Invariant: no secret is printed, and no byte of a file that holds a secret.

use super::check::Check;
use farside::Error;
use farside::config::{File, Settings, VARIABLES, default_socket, program, unknown_variables};
use farside_fabrics::shm::{ConnectError, NAME_MAX};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Runs the checks. As for all commands, `flags` override other settings.
pub(super) fn checks(flags: File) -> Vec<Check> {
    let settings = Settings::resolve(flags);
    let mut checks = vec![file(&settings)];
    if let Ok(settings) = &settings {
        let of = |path: &Option<farside::config::Setting>| path.as_ref().map(|path| path.value.clone());
        checks.push(named("settings.token", "token", of(&settings.token_file), settings.token().map(drop)));
        checks.push(named(
            "settings.tls_ca",
            "certificates",
            of(&settings.tls_ca),
            settings.tls_ca().map(drop),
        ));
    }
    checks.push(variables(&unknown_variables()));
    let path = default_socket();
    let folder = path.parent().and_then(|folder| std::fs::symlink_metadata(folder).ok());
    let folder =
        folder.map(|found| Folder { is_dir: found.is_dir(), user: found.uid(), mode: found.mode() & 0o777 });
    checks.push(folder_of(&path, folder, rustix::process::geteuid().as_raw()));
    checks.push(default_node(&path, socket_state(&path)));
    for (id, name) in [("program.redis", "redis-server"), ("program.memcached", "memcached")] {
        checks.push(rival(id, name, program(name).as_deref()));
    }
    checks
}

fn file(settings: &Result<Settings, String>) -> Check {
    const ID: (&str, &str) = ("settings.file", "settings");
    match settings {
        Err(reason) => Check::fail(ID.0, ID.1, reason.clone()).because("no command runs with such settings"),
        Ok(Settings { file: None, .. }) => {
            Check::ok(ID.0, ID.1, "no file: neither HOME nor FARSIDE_CONFIG is set")
        }
        Ok(Settings { file: Some(place), pool, store, .. }) => {
            let is_there = if place.is_there { "" } else { " (missing, which is fine)" };
            let found =
                format!("{}{is_there}; pool {}, store {}", place.path.display(), pool.value, store.value);
            Check::ok(ID.0, ID.1, found)
        }
    }
}

/// Checks a file that a setting names. `read` is the result of reading that file.
fn named(id: &'static str, what: &'static str, path: Option<String>, read: Result<(), String>) -> Check {
    match (path, read) {
        (_, Err(reason)) => Check::fail(id, what, reason).because("no node can be reached with it"),
        (Some(path), Ok(())) => Check::ok(id, what, path),
        (None, Ok(())) => Check::ok(id, what, "none named"),
    }
}

fn variables(unknown: &[String]) -> Check {
    const ID: (&str, &str) = ("settings.variables", "variables");
    match unknown {
        [] => Check::ok(ID.0, ID.1, "no unknown ones"),
        unknown => Check::warn(ID.0, ID.1, format!("unknown: {}", unknown.join(", ")))
            .because("they are probably misspelt")
            .remedy(format!("unset {}   (known: {})", unknown.join(" "), VARIABLES.join(", "))),
    }
}

/// Type, owner and mode of the file at the path of the default socket's folder.
#[derive(Clone, Copy)]
struct Folder {
    is_dir: bool,
    user: u32,
    mode: u32,
}

fn folder_of(socket: &Path, found: Option<Folder>, own_uid: u32) -> Check {
    const ID: (&str, &str) = ("socket.folder", "socket's folder");
    const WHY: &str = "'farside up' refuses a folder that other users can access";
    const ELSEWHERE: &str = "farside up --socket PATH";
    let folder = socket.parent().unwrap_or(Path::new("/")).display().to_string();
    if socket.as_os_str().len() > NAME_MAX {
        return Check::warn(
            ID.0,
            ID.1,
            format!("{folder}: the socket's path would be longer than {NAME_MAX} bytes"),
        )
        .because("the system allows no such socket")
        .remedy("export XDG_RUNTIME_DIR=/run/user/$(id -u)");
    }
    match found {
        None => Check::ok(ID.0, ID.1, format!("{folder} (missing; 'farside up' creates it)")),
        Some(Folder { is_dir: false, .. }) => {
            Check::warn(ID.0, ID.1, format!("{folder} is not a folder")).because(WHY).remedy(ELSEWHERE)
        }
        Some(Folder { user, .. }) if user != own_uid => {
            Check::warn(ID.0, ID.1, format!("{folder} belongs to user {user}")).because(WHY).remedy(ELSEWHERE)
        }
        Some(Folder { mode, .. }) if mode & 0o077 != 0 => {
            Check::warn(ID.0, ID.1, format!("{folder} has mode {mode:03o}"))
                .because(WHY)
                .remedy(format!("chmod 700 {}", crate::cli::node::quoted(&folder)))
        }
        Some(Folder { mode, .. }) => Check::ok(ID.0, ID.1, format!("{folder}, mode {mode:03o}")),
    }
}

/// State of the default socket.
#[derive(Clone, Debug, PartialEq)]
enum SocketState {
    Nothing,
    /// The file is a socket that no process serves.
    Stale,
    Node {
        pid: u32,
        release: String,
    },
    /// The process of the node, with this pid, is stopped.
    Stopped(u32),
    /// The file is not a socket, or the connection failed. Holds the reason.
    Wrong(String),
}

/// Connects to the default socket, and returns its state.
fn socket_state(path: &Path) -> SocketState {
    match std::fs::symlink_metadata(path) {
        Err(_) => return SocketState::Nothing,
        Ok(found) if !found.file_type().is_socket() => {
            return SocketState::Wrong("it is not a socket".into());
        }
        Ok(_) => {}
    }
    match farside::connect(&format!("shm:{}", path.display())).and_then(|pool| pool.info()) {
        Ok(info) => SocketState::Node { pid: info.pid, release: info.version },
        Err(Error::Connect(ConnectError::Absent(_))) => SocketState::Stale,
        Err(Error::Connect(ConnectError::Stopped(pid))) => SocketState::Stopped(pid),
        Err(error) => SocketState::Wrong(error.to_string()),
    }
}

fn default_node(path: &Path, state: SocketState) -> Check {
    const ID: (&str, &str) = ("socket.default", "default node");
    let place = path.display();
    match state {
        SocketState::Nothing => Check::ok(ID.0, ID.1, format!("none at {place}; 'farside up' starts one")),
        SocketState::Node { pid, release } => {
            Check::ok(ID.0, ID.1, format!("pid {pid}, release {release}, serves at {place}"))
        }
        SocketState::Stale => Check::note(ID.0, ID.1, format!("{place} was left by a node that died"))
            .because("the next 'farside up' replaces it"),
        SocketState::Stopped(pid) => Check::warn(ID.0, ID.1, format!("pid {pid} is stopped, at {place}"))
            .because("new clients cannot connect until it is resumed")
            .remedy(format!("kill -CONT {pid}")),
        SocketState::Wrong(reason) => Check::warn(ID.0, ID.1, format!("{place}: {reason}"))
            .because("commands without --pool connect to it")
            .remedy("farside up --socket PATH, and --pool shm:PATH or FARSIDE_POOL for clients"),
    }
}

fn rival(id: &'static str, name: &'static str, path: Option<&Path>) -> Check {
    match path {
        Some(path) => Check::ok(id, name, path.display().to_string()),
        None => Check::note(id, name, "not on PATH").because("only comparisons with it need it"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict::*;
    use super::super::tests::is;
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn unusable_settings_fail() {
        is(&file(&Err("x is not a settings file: line 3".into())), Fail, "line 3", "");
        is(&named("a", "token", Some("/t".into()), Result::Ok(())), Ok, "/t", "");
        is(&named("a", "token", None, Result::Ok(())), Ok, "none named", "");
        is(&named("a", "token", Some("/t".into()), Err("'chmod 600' it".into())), Fail, "chmod 600", "");
    }

    #[test]
    fn unknown_variables_are_named_beside_the_known_ones() {
        is(&variables(&[]), Ok, "no unknown ones", "");
        let two = ["FARSIDE_POOOL".to_owned(), "FARSIDE_X".to_owned()];
        is(
            &variables(&two),
            Warn,
            "FARSIDE_POOOL, FARSIDE_X",
            "unset FARSIDE_POOOL FARSIDE_X   (known: FARSIDE_POOL,",
        );
    }

    #[test]
    fn the_sockets_folder_must_be_private() {
        let socket = PathBuf::from("/run/me/farside/default.sock");
        let of = |is_dir, user, mode| folder_of(&socket, Some(Folder { is_dir, user, mode }), 7);
        is(&folder_of(&socket, None, 7), Ok, "missing", "");
        is(&of(true, 7, 0o700), Ok, "mode 700", "");
        is(&of(true, 7, 0o750), Warn, "mode 750", "chmod 700 /run/me/farside");
        is(&of(true, 8, 0o700), Warn, "belongs to user 8", "--socket");
        is(&of(false, 7, 0o600), Warn, "not a folder", "--socket");
        let long = PathBuf::from(format!("/{}/default.sock", "x".repeat(100)));
        is(&folder_of(&long, None, 7), Warn, "longer than 107 bytes", "XDG_RUNTIME_DIR");
    }

    #[test]
    fn every_state_of_the_default_socket_is_reported() {
        let of = |state| default_node(Path::new("/run/s"), state);
        is(&of(SocketState::Nothing), Ok, "'farside up' starts one", "");
        is(&of(SocketState::Node { pid: 5, release: "0.1.0".into() }), Ok, "pid 5, release 0.1.0", "");
        is(&of(SocketState::Stale), Note, "left by a node that died", "");
        is(&of(SocketState::Stopped(5)), Warn, "pid 5 is stopped", "kill -CONT 5");
        is(&of(SocketState::Wrong("it is not a socket".into())), Warn, "it is not a socket", "--socket");
    }

    #[test]
    fn a_missing_program_to_compare_with_is_only_a_note() {
        is(&rival("a", "redis-server", Some(Path::new("/usr/bin/redis-server"))), Ok, "/usr/bin", "");
        is(&rival("a", "redis-server", None), Note, "not on PATH", "");
    }
}
