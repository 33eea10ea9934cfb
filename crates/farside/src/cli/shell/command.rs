//! What can be asked in the shell, from its words.

/// A command, as people are told of it.
pub(super) struct Known {
    /// Its name.
    pub(super) name: &'static str,
    /// What follows it.
    pub(super) usage: &'static str,
    /// What it does, in a line.
    pub(super) what: &'static str,
    /// The rest that is to be known.
    pub(super) more: &'static str,
    /// Whether what follows its key is a value.
    pub(super) has_value: bool,
    build: fn(Vec<Vec<u8>>) -> Built,
}

/// What the words after a name make: nothing if they are too few or too many, or the reason why they make no command.
type Built = Option<Result<Command, String>>;

/// A command that can be carried out.
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
    Help(Option<&'static Known>),
    Quit,
}

/// How many keys are listed if nobody says.
const COUNT: u64 = 100;

const BYTES: &str =
    "Keys are 1 to 4096 bytes, values up to 16 MiB. \"...\" holds blanks, and \\n \\r \\t \\\\ \\\" \\xHH.";
const LISTING: &str = "Visits the store in the order of its table, reads every key on the way, and stops after COUNT \
                       that begin with PREFIX (100 if left out). No snapshot: what comes or goes meanwhile may be \
                       missed.";

/// All commands, in the order in which they are listed.
pub(super) const ALL: [Known; 16] = [
    Known {
        name: "get",
        usage: "KEY",
        what: "the value of a key",
        more: "",
        has_value: false,
        build: |words| key(words).map(|key| Ok(Command::Get { key })),
    },
    Known {
        name: "getv",
        usage: "KEY",
        what: "the value of a key, with its version",
        more: "A version is a number that changes with every put and delete of the key: 'cas' takes it.",
        has_value: false,
        build: |words| key(words).map(|key| Ok(Command::GetV { key })),
    },
    Known {
        name: "put",
        usage: "KEY VALUE",
        what: "give a key a value",
        more: BYTES,
        has_value: true,
        build: |words| pair(words).map(|(key, value)| Ok(Command::Put { key, value })),
    },
    Known {
        name: "put-if-absent",
        usage: "KEY VALUE",
        what: "give a key a value if it has none",
        more: "Answers whether it did.",
        has_value: true,
        build: |words| pair(words).map(|(key, value)| Ok(Command::PutIfAbsent { key, value })),
    },
    Known {
        name: "cas",
        usage: "KEY VERSION VALUE",
        what: "give a key another value if it still has this version",
        more: "'getv' tells a key's version. Answers the new version, or which one the key has instead.",
        has_value: true,
        build: cas,
    },
    Known {
        name: "del",
        usage: "KEY",
        what: "take the value of a key away",
        more: "",
        has_value: false,
        build: |words| key(words).map(|key| Ok(Command::Del { key })),
    },
    Known {
        name: "exists",
        usage: "KEY",
        what: "whether a key has a value",
        more: "",
        has_value: false,
        build: |words| key(words).map(|key| Ok(Command::Exists { key })),
    },
    Known {
        name: "keys",
        usage: "[PREFIX] [COUNT]",
        what: "list keys",
        more: LISTING,
        has_value: false,
        build: |words| list(words, false),
    },
    Known {
        name: "scan",
        usage: "[PREFIX] [COUNT]",
        what: "list keys with their values",
        more: LISTING,
        has_value: false,
        build: |words| list(words, true),
    },
    Known {
        name: "stat",
        usage: "",
        what: "how the store's memory is used",
        more: "",
        has_value: false,
        build: |words| none(&words, Command::Stat),
    },
    Known {
        name: "info",
        usage: "",
        what: "about the node",
        more: "",
        has_value: false,
        build: |words| none(&words, Command::Info),
    },
    Known {
        name: "stores",
        usage: "",
        what: "list the node's stores",
        more: "",
        has_value: false,
        build: |words| none(&words, Command::Stores),
    },
    Known {
        name: "use",
        usage: "STORE",
        what: "go on with another store",
        more: "",
        has_value: false,
        build: |words| {
            let store = only(words)?;
            Some(String::from_utf8(store).map(|store| Command::Use { store }).map_err(|_| {
                "no store has a name that is not UTF-8: 'stores' lists those that there are".to_owned()
            }))
        },
    },
    Known {
        name: "trace",
        usage: "on|off",
        what: "tell on standard error what each command asks of the node",
        more: "",
        has_value: false,
        build: |words| switch(words).map(|on| Ok(Command::Trace(on))),
    },
    Known {
        name: "time",
        usage: "on|off",
        what: "tell how long each command takes, in this process",
        more: "",
        has_value: false,
        build: |words| switch(words).map(|on| Ok(Command::Time(on))),
    },
    Known {
        name: "help",
        usage: "[COMMAND]",
        what: "this list, or more of one command",
        more: "",
        has_value: false,
        build: |words| match &words[..] {
            [] => Some(Ok(Command::Help(None))),
            [name] => Some(known(name).map(|known| Command::Help(Some(known)))),
            _ => None,
        },
    },
];

/// The names by which the shell is left.
pub(super) const LEAVE: [&str; 2] = ["quit", "exit"];

/// The command that the words are; there is at least one.
pub(super) fn parse(words: Vec<Vec<u8>>) -> Result<Command, String> {
    let mut words = words.into_iter();
    let name = words.next().expect("a line without words is no command");
    let rest: Vec<_> = words.collect();
    if LEAVE.iter().any(|leave| name.eq_ignore_ascii_case(leave.as_bytes())) {
        return if rest.is_empty() {
            Ok(Command::Quit)
        } else {
            Err("nothing follows 'quit': leave the rest out".into())
        };
    }
    let known = known(&name)?;
    (known.build)(rest).unwrap_or_else(|| {
        Err(format!(
            "write it like '{}'; a word with blanks goes into double quotes, and flags of farside itself before the \
             command",
            known.form()
        ))
    })
}

/// The command of that name.
pub(super) fn known(name: &[u8]) -> Result<&'static Known, String> {
    ALL.iter().find(|known| name.eq_ignore_ascii_case(known.name.as_bytes())).ok_or_else(|| {
        const SHOWN_MAX: usize = 40;
        let shown = super::words::quoted(&name[..name.len().min(SHOWN_MAX)]);
        let more = if name.len() > SHOWN_MAX { "..." } else { "" };
        format!("there is no command {shown}{more}: 'help' lists those that there are")
    })
}

impl Known {
    /// The name with what follows.
    pub(super) fn form(&self) -> String {
        format!("{} {}", self.name, self.usage).trim_end().to_owned()
    }
}

impl PartialEq for Known {
    fn eq(&self, other: &Known) -> bool {
        self.name == other.name
    }
}

impl Eq for Known {}

impl std::fmt::Debug for Known {
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

fn none(words: &[Vec<u8>], command: Command) -> Built {
    words.is_empty().then_some(Ok(command))
}

fn switch(words: Vec<Vec<u8>>) -> Option<bool> {
    match &only(words)?.to_ascii_lowercase()[..] {
        b"on" => Some(true),
        b"off" => Some(false),
        _ => None,
    }
}

fn cas(words: Vec<Vec<u8>>) -> Built {
    let [key, version, value] = <[_; 3]>::try_from(words).ok()?;
    Some(match number(&version) {
        Some(version) => Ok(Command::Cas { key, version, value }),
        None => Err(format!(
            "{} is no version: give the number that 'getv' tells of the key",
            super::words::quoted(&version)
        )),
    })
}

fn list(words: Vec<Vec<u8>>, values: bool) -> Built {
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
                    "{} is no number of keys: give 1 or more, after the prefix ('' for all)",
                    super::words::quoted(&word)
                )));
            }
        },
    };
    Some(Ok(Command::List { prefix, count, values }))
}

/// Digits alone: a sign or a blank would be a slip.
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
    fn what_is_no_command_is_refused_with_what_would_be_one() {
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
