//! Settings of the `farside` command. Each comes from the first source that has it: the flags, the `FARSIDE_*`
//! variables, the settings file, or the defaults.
//!
//! Invariant: no other module reads the environment.

use farside_fabrics::session::TOKEN_BYTES_MAX;
use rustix::fs::OFlags;
use serde::Deserialize;
use std::ffi::OsString;
use std::fs::Metadata;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Settings that one source gives: the flags or the settings file. An absent setting comes from the next source.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// Url of the node.
    pub pool: Option<String>,
    /// Name of the store.
    pub store: Option<String>,
    /// Path of the file with the token that the client presents to nodes.
    pub token_file: Option<String>,
    /// Path of the file with the trusted certificates for `tls:`, in PEM.
    pub tls_ca: Option<String>,
}

/// Environment variables that hold settings. A node's own options are flags only, so that the script or systemd unit
/// that starts a node shows all of them.
pub const VARIABLES: [&str; 5] =
    ["FARSIDE_POOL", "FARSIDE_STORE", "FARSIDE_TOKEN_FILE", "FARSIDE_TLS_CA", "FARSIDE_CONFIG"];

/// A setting and its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Value of the setting.
    pub value: String,
    /// Origin of the value: `flag`, the variable's name, the file's path, or `built in`.
    pub origin: String,
}

/// All settings, after every source was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Url of the node.
    pub pool: Setting,
    /// Name of the store.
    pub store: Setting,
    /// Path of the file with the token that the client presents to nodes, if one is set.
    pub token_file: Option<Setting>,
    /// Path of the file with the trusted certificates for `tls:`, if one is set.
    pub tls_ca: Option<Setting>,
    /// Whether `udp:` packets are sent in the clear although a token is set. Only a flag sets it, because an option
    /// that discloses a secret must be visible in the command that uses it.
    pub insecure_udp: bool,
    /// Place of the settings file; absent if the environment names neither a file nor a home folder.
    pub file: Option<Place>,
}

/// Place of the settings file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Path of the file.
    pub path: PathBuf,
    /// Name of the environment variable that gave the path.
    pub origin: &'static str,
    /// Whether the file exists. Always true if `FARSIDE_CONFIG` names the file, because reading then reports a missing
    /// file as an error.
    pub is_there: bool,
}

impl Settings {
    /// Reads all sources; `flags` are the settings of the command line.
    ///
    /// # Errors
    /// The settings file cannot be read or is invalid, or a variable is not UTF-8. The text names the file or the
    /// variable, and the remedy.
    pub fn resolve(flags: File) -> Result<Settings, String> {
        let place = file_place();
        let read = place.as_ref().filter(|place| place.is_there).map(|place| read_file(&place.path));
        let file = read.transpose()?.unwrap_or_default();
        let origin = place.as_ref().map_or_else(String::new, |place| place.path.display().to_string());
        let pick = |flag: Option<String>, variable: &str, filed: Option<String>| {
            let set = |value: String, origin: &str| {
                Ok::<_, String>(Some(Setting { value, origin: origin.to_owned() }))
            };
            if let Some(value) = flag {
                set(value, "flag")
            } else if let Some(value) = variable_text(variable)? {
                set(value, variable)
            } else if let Some(value) = filed {
                set(value, &origin)
            } else {
                Ok(None)
            }
        };
        let built_in = |value: String| move || Setting { value, origin: "built in".into() };
        let default_pool = format!("shm:{}", default_socket().display());
        Ok(Settings {
            pool: pick(flags.pool, "FARSIDE_POOL", file.pool)?.unwrap_or_else(built_in(default_pool)),
            store: pick(flags.store, "FARSIDE_STORE", file.store)?.unwrap_or_else(built_in("default".into())),
            token_file: pick(flags.token_file, "FARSIDE_TOKEN_FILE", file.token_file)?,
            tls_ca: pick(flags.tls_ca, "FARSIDE_TLS_CA", file.tls_ca)?,
            insecure_udp: false,
            file: place,
        })
    }

    /// Reads the token from [`Settings::token_file`], if that is set.
    ///
    /// # Errors
    /// As [`read_token`].
    pub fn token(&self) -> Result<Option<String>, String> {
        self.token_file.as_ref().map(|file| read_token(Path::new(&file.value))).transpose()
    }

    /// Reads the text of [`Settings::tls_ca`], if that is set. The certificates are not checked.
    ///
    /// # Errors
    /// As [`read_text`].
    pub fn tls_ca(&self) -> Result<Option<String>, String> {
        self.tls_ca.as_ref().map(|file| read_text(Path::new(&file.value), "certificates")).transpose()
    }
}

/// Reads the token in a file, without the white space around it.
///
/// # Errors
/// The file cannot be read, other users can read or write it, or it holds no valid token. The text names the remedy.
pub fn read_token(path: &Path) -> Result<String, String> {
    let text = read_private(path)?;
    let token = text.trim_ascii();
    if token.is_empty() || token.len() > TOKEN_BYTES_MAX || !token.bytes().all(|byte| byte.is_ascii_graphic())
    {
        return Err(format!(
            "{} holds no token: put one line into it, of at most {TOKEN_BYTES_MAX} visible ASCII characters, such as \
             'farside token new' prints",
            path.display()
        ));
    }
    Ok(token.to_owned())
}

/// Size limit of a file that a setting names, in bytes.
const TEXT_MAX: u64 = 1 << 20;

/// Reads the text of a file that only its owner may read or write.
///
/// # Errors
/// The file cannot be read, other users can read or write it, it is not a regular file of at most 1 MiB, or it is not
/// UTF-8. The text names the remedy.
pub fn read_private(path: &Path) -> Result<String, String> {
    let (file, found) = open_regular(path, "secrets")?;
    if found.mode() & 0o077 != 0 {
        return Err(format!(
            "{} can be read or written by others (mode {:03o}): 'chmod 600' it",
            path.display(),
            found.mode() & 0o777
        ));
    }
    text_of(file, path)
}

/// Reads the text of a file. `things` names the file's content in errors, for example `certificates`.
///
/// # Errors
/// The file cannot be read, it is not a regular file of at most 1 MiB, or it is not UTF-8. The text names the remedy.
pub fn read_text(path: &Path, things: &str) -> Result<String, String> {
    text_of(open_regular(path, things)?.0, path)
}

fn open_regular(path: &Path, things: &str) -> Result<(std::fs::File, Metadata), String> {
    // Without this flag, opening a named pipe blocks until a writer opens the other end.
    let nonblocking = OFlags::NONBLOCK.bits() as i32;
    let file = std::fs::File::options().read(true).custom_flags(nonblocking).open(path);
    let opened = file.and_then(|file| file.metadata().map(|found| (file, found)));
    let (file, found) = opened.map_err(|error| unreadable(path, &error))?;
    if !found.is_file() || found.len() > TEXT_MAX {
        return Err(format!(
            "{} is not a file of {things}: name a regular file of at most {} MiB",
            path.display(),
            TEXT_MAX >> 20
        ));
    }
    Ok((file, found))
}

fn text_of(file: std::fs::File, path: &Path) -> Result<String, String> {
    let mut text = String::new();
    file.take(TEXT_MAX).read_to_string(&mut text).map_err(|error| unreadable(path, &error))?;
    Ok(text)
}

fn unreadable(path: &Path, error: &std::io::Error) -> String {
    format!("could not read {}: {error}; name a file that you may read", path.display())
}

/// Returns a variable's value. An empty value counts as unset.
fn variable_value(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn variable_text(name: &str) -> Result<Option<String>, String> {
    let text = variable_value(name).map(OsString::into_string).transpose();
    text.map_err(|value| format!("{name} is {value:?}, which is not UTF-8: set it to text, or unset it"))
}

/// Returns the environment variables that start with `FARSIDE_` and are not in [`VARIABLES`]. Such names are probably
/// misspelt.
pub fn unknown_variables() -> Vec<String> {
    let ours = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    ours.filter(|name| name.starts_with("FARSIDE_") && !VARIABLES.contains(&name.as_str())).collect()
}

/// Place of the settings file. A file that `FARSIDE_CONFIG` names must exist; the default file is optional.
fn file_place() -> Option<Place> {
    if let Some(path) = variable_value("FARSIDE_CONFIG") {
        return Some(Place { path: path.into(), origin: "FARSIDE_CONFIG", is_there: true });
    }
    let of_home = || variable_value("HOME").map(|home| (Path::new(&home).join(".config"), "HOME"));
    let base = variable_value("XDG_CONFIG_HOME").map(|base| (PathBuf::from(base), "XDG_CONFIG_HOME"));
    let (base, origin) = base.or_else(of_home)?;
    let path = base.join("farside/config.toml");
    let is_there = path.exists();
    Some(Place { path, origin, is_there })
}

fn read_file(path: &Path) -> Result<File, String> {
    let text = read_text(path, "settings")
        .map_err(|reason| format!("could not read the settings: {reason}, with FARSIDE_CONFIG"))?;
    parse_file(&text).map_err(|reason| {
        format!(
            "{} is not a valid settings file: {reason}; it may set pool, store, token_file and tls_ca",
            path.display()
        )
    })
}

/// Parses the settings file.
///
/// # Errors
/// The text is not TOML, or sets an unknown key. The error names the line.
fn parse_file(text: &str) -> Result<File, String> {
    toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.as_bytes().get(..span.start));
        let line = before.map(|before| before.iter().filter(|&&byte| byte == b'\n').count() + 1);
        let at = line.map_or_else(String::new, |line| format!("line {line}: "));
        format!("{at}{}", error.message())
    })
}

/// Port of a node's engines, for urls that name no port.
pub const DATA_PORT: u16 = 7460;
/// Default address of a node's HTTP endpoint for metrics and health.
pub const ADMIN_ADDRESS: &str = "127.0.0.1:7400";

/// Returns the path of the default socket with its origin: `XDG_RUNTIME_DIR` or `built in`.
pub fn usual_socket() -> Setting {
    let origin = if variable_value("XDG_RUNTIME_DIR").is_some() { "XDG_RUNTIME_DIR" } else { "built in" };
    Setting { value: default_socket().display().to_string(), origin: origin.into() }
}

/// Whether output must have no colours: `NO_COLOR` is set (<https://no-color.org>), or `TERM` is `dumb`.
pub fn forbids_colour() -> bool {
    variable_value("NO_COLOR").is_some() || variable_value("TERM").is_some_and(|terminal| terminal == "dumb")
}

/// Path of the executable that a shell would start for `name`: the first one in the folders of `PATH`.
pub fn program(name: &str) -> Option<PathBuf> {
    let folders = variable_value("PATH")?;
    let is_program = |path: &PathBuf| {
        std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.mode() & 0o111 != 0)
    };
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(is_program)
}

/// Folder of this user's persistent state, such as the shell's history. Absent if the environment names no such folder.
pub fn state_folder() -> Option<PathBuf> {
    let base = variable_value("XDG_STATE_HOME")
        .map(PathBuf::from)
        .or_else(|| variable_value("HOME").map(|home| Path::new(&home).join(".local/state")))?;
    // The XDG specification says to ignore a relative path.
    Some(base.join("farside")).filter(|folder| folder.is_absolute())
}

/// Path of the default socket, at which `farside up` serves and to which clients connect.
pub fn default_socket() -> PathBuf {
    default_folder().join("default.sock")
}

/// Folder of the default socket, private to this user.
fn default_folder() -> PathBuf {
    match variable_value("XDG_RUNTIME_DIR") {
        Some(folder) => Path::new(&folder).join("farside"),
        None => std::env::temp_dir().join(format!("farside-{}", rustix::process::geteuid().as_raw())),
    }
}

/// Prepares the folder in which `socket` will be served. The default folder is created, private to this user. Any
/// other folder must exist.
///
/// # Errors
/// The folder is missing, cannot be created, belongs to another user, or is open to other users. The text names the
/// remedy.
pub fn make_folder_of(socket: &Path) -> Result<(), String> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};
    let Some(folder) = socket.parent().filter(|folder| !folder.as_os_str().is_empty()) else { return Ok(()) };
    if folder != default_folder() {
        let exists = folder.is_dir();
        return if exists {
            Ok(())
        } else {
            Err(format!("{} is not a folder: make it, or serve elsewhere by --socket", folder.display()))
        };
    }
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| {
        format!("could not make {}: {error}; serve elsewhere by --socket", folder.display())
    })?;
    let found = std::fs::symlink_metadata(folder).map_err(|error| error.to_string())?;
    if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o077 != 0 {
        return Err(format!(
            "{} must be a folder that you own and no other user can access: remove it, or serve elsewhere by \
             --socket",
            folder.display()
        ));
    }
    Ok(())
}

/// Parses a number of bytes: `65536`, `64KiB`, `512MiB`, `2GiB`, also `64k`, `512m`, `2g`. All units are powers of
/// 1024; case does not matter.
///
/// # Errors
/// The text is not a number of bytes, or the number exceeds a `u64`. The error shows valid forms.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim().trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text.trim()[digits.len()..].to_ascii_lowercase();
    let shift = match unit.as_str() {
        "" | "b" => Some(0),
        "k" | "kib" => Some(10),
        "m" | "mib" => Some(20),
        "g" | "gib" => Some(30),
        "t" | "tib" => Some(40),
        _ => None,
    };
    let number = digits.trim().parse::<u64>().ok();
    number.zip(shift).and_then(|(number, shift)| number.checked_mul(1 << shift)).ok_or_else(|| {
        format!("'{text}' is not a number of bytes: write it like 65536, 64KiB, 512MiB or 2GiB")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_in_the_settings_file_names_its_line() {
        for (text, line, reason) in [
            ("poool = 'x'", "line 1: ", "unknown field `poool`, expected one of `pool`, `store`"),
            ("pool = 'x'\n\n# a word\nstor = 'y'\n", "line 4: ", "unknown field `stor`"),
            ("store = 'x'\npool = 5\n", "line 2: ", "expected a string"),
            ("store = 'x'\nstore = 'y'\n", "line 2: ", "duplicate key"),
            ("store = 'x'\n\npool = 'unended", "line 3: ", ""),
        ] {
            let error = parse_file(text).expect_err(text);
            assert!(error.starts_with(line) && error.contains(reason), "{text:?}: {error}");
        }
        assert_eq!(parse_file(""), Ok(File::default()));
    }

    #[test]
    fn a_number_of_bytes_may_have_a_unit_and_nothing_else() {
        assert_eq!(parse_bytes("65536"), Ok(65536));
        assert_eq!(parse_bytes("64KiB"), Ok(64 << 10));
        assert_eq!(parse_bytes("1g"), Ok(1 << 30));
        for bad in ["", "x", "-1", "1.5G", "1 parsec", "99999999999999T", "18446744073709551616"] {
            assert!(parse_bytes(bad).expect_err(bad).contains("512MiB"), "{bad}");
        }
    }
}
