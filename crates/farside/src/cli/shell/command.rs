//! Describes the commands of the shell, and parses them from words.

/// Description of a shell command.
pub(super) struct Description {
    /// Name of the command.
    pub(super) name: &'static str,
    /// Placeholders of the command's arguments, such as `KEY VALUE`.
    pub(super) usage: &'static str,
    /// Effect of the command, in one line.
    pub(super) what: &'static str,
    /// Further explanation for `help COMMAND`; may be empty.
    pub(super) more: &'static str,
    /// Whether the command's arguments include a value, which must not be written to the history file.
    pub(super) has_value: bool,
    /// Function that parses the words after the command's name.
    build: fn(Vec<Vec<u8>>) -> Parsed,
}

/// Result of parsing a command's arguments. `None` means a wrong number of arguments; an error holds the reason and the
/// remedy.
type Parsed = Option<Result<Command, String>>;

/// A shell command with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Get { key: Vec<u8> },
    GetV { key: Vec<u8> },
    Put { key: Vec<u8>, value: Vec<u8> },
    PutIfAbsent { key: Vec<u8>, value: Vec<u8> },
    Cas { key: Vec<u8>, version: u32, value: Vec<u8> },
    Del { key: Vec<u8> },
    Exists { key: Vec<u8> },
    List { prefix: Vec<u8>, count: u64, values: bool },
    Stat,
    Info,
    Stores,
    Use { store: String },
    Trace(bool),
    Time(bool),
    Help(Option<&'static Description>),
    Quit,
}

/// Default maximum number of keys in a listing.
const COUNT: u64 = 100;

const BYTES: &str = "Keys are 1 to 4096 bytes, values up to 16 MiB. \"...\" may contain \
                     blanks, and \\n \\r \\t \\\\ \\\" \\xHH.";
const LISTING: &str = "Reads all keys in the order of the store's table, and stops after COUNT that begin with PREFIX \
                       (default: 100). Not a snapshot: keys that are stored or deleted meanwhile may be missed.";

/// All commands, in the order in which `help` lists them.
pub(super) const ALL: [Description; 16] = [
    Description {
        name: "get",
        usage: "KEY",
        what: "print the value of a key",
        more: "",
        has_value: false,
        build: |words| key(words).map(|key| Ok(Command::Get { key })),
    },
    Description {
        name: "getv",
        usage: "KEY",
        what: "print the value of a key, and its version",
        more: "A version is a number that changes with every put and delete of the key: 'cas' takes it.",
        has_value: false,
        build: |words| key(words).map(|key| Ok(Command::GetV { key })),
    },
    Description {
        name: "put",
        usage: "KEY VALUE",
        what: "set the value of a key",
        more: BYTES,
        has_value: true,
        build: |words| pair(words).map(|(key, value)| Ok(Command::Put { key, value })),
    },
    Description {
        name: "put-if-absent",
        usage: "KEY VALUE",
        what: "set the value of a key if the key is absent",
        more: "Reports whether it stored the value.",
        has_value: true,
        build: |words| pair(words).map(|(key, value)| Ok(Command::PutIfAbsent { key, value })),
    },
    Description {
        name: "cas",
        usage: "KEY VERSION VALUE",
        what: "replace the value of a key if the key still has this version",
        more: "'getv' prints a key's version. Prints the new version, or the one that the key has instead.",
        has_value: true,
        build: cas,
    },
    Description {
        name: "del",
        usage: "KEY",
        what: "delete a key",
        more: "",
        has_value: false,
        build: |words| key(words).map(|key| Ok(Command::Del { key })),
    },
    Description {
        name: "exists",
        usage: "KEY",
        what: "print whether a key has a value",
        more: "",
        has_value: false,
        build: |words| key(words).map(|key| Ok(Command::Exists { key })),
    },
    Description {
        name: "keys",
        usage: "[PREFIX] [COUNT]",
        what: "list keys",
        more: LISTING,
        has_value: false,
        build: |words| list(words, false),
    },
    Description {
        name: "scan",
        usage: "[PREFIX] [COUNT]",
        what: "list keys with their values",
        more: LISTING,
        has_value: false,
        build: |words| list(words, true),
    },
    Description {
        name: "stat",
        usage: "",
        what: "show how the store's memory is used",
        more: "",
        has_value: false,
        build: |words| none(&words, Command::Stat),
    },
    Description {
        name: "info",
        usage: "",
        what: "show the node",
        more: "",
        has_value: false,
        build: |words| none(&words, Command::Info),
    },
    Description {
        name: "stores",
        usage: "",
        what: "list the node's stores",
        more: "",
        has_value: false,
        build: |words| none(&words, Command::Stores),
    },
    Description {
        name: "use",
        usage: "STORE",
        what: "switch to another store",
        more: "",
        has_value: false,
        build: |words| {
            let store = only(words)?;
            Some(
                String::from_utf8(store)
                    .map(|store| Command::Use { store })
                    .map_err(|_| "the name of the store is not UTF-8: 'stores' lists the stores".to_owned()),
            )
        },
    },
    Description {
        name: "trace",
        usage: "on|off",
        what: "print each command's requests to the node, on standard error",
        more: "",
        has_value: false,
        build: |words| switch(words).map(|on| Ok(Command::Trace(on))),
    },
    Description {
        name: "time",
        usage: "on|off",
        what: "print how long each command takes, as measured by this process",
        more: "",
        has_value: false,
        build: |words| switch(words).map(|on| Ok(Command::Time(on))),
    },
    Description {
        name: "help",
        usage: "[COMMAND]",
        what: "list the commands, or explain one of them",
        more: "",
        has_value: false,
        build: |words| match &words[..] {
            [] => Some(Ok(Command::Help(None))),
            [name] => Some(find(name).map(|known| Command::Help(Some(known)))),
            _ => None,
        },
    },
];

/// Names of the command that ends the shell.
pub(super) const LEAVE: [&str; 2] = ["quit", "exit"];

/// Parses a command from the words of a line.
///
/// # Panics
/// If `words` is empty.
pub(super) fn parse(words: Vec<Vec<u8>>) -> Result<Command, String> {
    let mut words = words.into_iter();
    let name = words.next().expect("the caller skips lines without words");
    let rest: Vec<_> = words.collect();
    if LEAVE.iter().any(|leave| name.eq_ignore_ascii_case(leave.as_bytes())) {
        return if rest.is_empty() {
            Ok(Command::Quit)
        } else {
            Err("'quit' takes no arguments: leave the rest out".into())
        };
    }
    let known = find(&name)?;
    (known.build)(rest).unwrap_or_else(|| {
        Err(format!(
            "wrong arguments: write '{}'; put a word that contains blanks in double quotes, and flags of farside \
             itself before the command",
            known.form()
        ))
    })
}

/// Finds the description of a command by its name. Upper and lower case are equal.
pub(super) fn find(name: &[u8]) -> Result<&'static Description, String> {
    ALL.iter().find(|known| name.eq_ignore_ascii_case(known.name.as_bytes())).ok_or_else(|| {
        const SHOWN_MAX: usize = 40;
        let shown = super::words::quoted(&name[..name.len().min(SHOWN_MAX)]);
        let more = if name.len() > SHOWN_MAX { "..." } else { "" };
        format!("there is no command {shown}{more}: 'help' lists the commands")
    })
}

impl Description {
    /// Returns the command's name, followed by the placeholders of its arguments.
    pub(super) fn form(&self) -> String {
        format!("{} {}", self.name, self.usage).trim_end().to_owned()
    }
}

impl PartialEq for Description {
    fn eq(&self, other: &Description) -> bool {
        self.name == other.name
    }
}

impl Eq for Description {}

impl std::fmt::Debug for Description {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

fn only(words: Vec<Vec<u8>>) -> Option<Vec<u8>> {
    let [word] = <[_; 1]>::try_from(words).ok()?;
    Some(word)
}

fn key(words: Vec<Vec<u8>>) -> Option<Vec<u8>> {
    only(words)
}

fn pair(words: Vec<Vec<u8>>) -> Option<(Vec<u8>, Vec<u8>)> {
    let [key, value] = <[_; 2]>::try_from(words).ok()?;
    Some((key, value))
}

fn none(words: &[Vec<u8>], command: Command) -> Parsed {
    words.is_empty().then_some(Ok(command))
}

fn switch(words: Vec<Vec<u8>>) -> Option<bool> {
    match &only(words)?.to_ascii_lowercase()[..] {
        b"on" => Some(true),
        b"off" => Some(false),
        _ => None,
    }
}

fn cas(words: Vec<Vec<u8>>) -> Parsed {
    let [key, version, value] = <[_; 3]>::try_from(words).ok()?;
    Some(match number(&version) {
        Some(version) => Ok(Command::Cas { key, version, value }),
        None => Err(format!(
            "{} is not a version: give the number that 'getv' prints for the key",
            super::words::quoted(&version)
        )),
    })
}

fn list(words: Vec<Vec<u8>>, values: bool) -> Parsed {
    if words.len() > 2 {
        return None;
    }
    let mut words = words.into_iter();
    let prefix = words.next().unwrap_or_default();
    let count = match words.next() {
        None => COUNT,
        Some(word) => match number(&word).filter(|&count| count > 0) {
            Some(count) => count,
            None => {
                return Some(Err(format!(
                    "{} is not a number of keys: give 1 or more, after the prefix ('' for all keys)",
                    super::words::quoted(&word)
                )));
            }
        },
    };
    Some(Ok(Command::List { prefix, count, values }))
}

/// Parses a number. The word may contain digits only; a sign is refused as a typing mistake.
fn number<N: std::str::FromStr>(word: &[u8]) -> Option<N> {
    let text = std::str::from_utf8(word).ok()?;
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::super::words::split;
    use super::*;

    fn parsed(line: &str) -> Result<Command, String> {
        parse(split(line.as_bytes()).expect(line))
    }

    #[test]
    fn every_command_is_parsed_from_its_own_form() {
        for known in &ALL {
            let form = known.form().replace("VERSION", "7").replace("COUNT", "9").replace("on|off", "ON");
            let form = form.replace("[COMMAND]", "get").replace(['[', ']'], "");
            assert!(parsed(&form).is_ok(), "{form}");
            assert!(parsed(&format!("{form} a b c d")).is_err(), "{form} and four words");
        }
        assert_eq!((parsed("QUIT"), parsed("exit")), (Ok(Command::Quit), Ok(Command::Quit)));
    }

    #[test]
    fn a_malformed_command_is_refused_with_its_form() {
        for (bad, remedy) in [
            ("frob", "'help'"),
            ("get", "'get KEY'"),
            ("get a b", "'get KEY'"),
            ("put a", "'put KEY VALUE'"),
            ("cas k new v", "'getv'"),
            ("cas k -1 v", "'getv'"),
            ("cas k 4294967296 v", "'getv'"),
            ("keys a 0", "1 or more"),
            ("scan a +1", "1 or more"),
            ("trace maybe", "'trace on|off'"),
            ("help frob", "'help'"),
            ("quit now", "leave the rest out"),
            ("\"\"", "no command \"\""),
        ] {
            let reason = parsed(bad).expect_err(bad);
            assert!(reason.contains(remedy), "{bad}: {reason}");
        }
    }
}
