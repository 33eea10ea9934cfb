//! Checks the dependencies ("arrows") between the workspace's crates, as declared in their manifests.

use super::Finding;

/// A package, and the packages of this workspace that it may depend on. Every package may depend on itself, since tests
/// do that to enable features.
struct Arrows {
    package: &'static str,
    uses: &'static [&'static str],
    /// Packages that only the tests of `package` may use.
    tests_use: &'static [&'static str],
}

const ARROWS: [Arrows; 12] = [
    Arrows { package: "farside-remote", uses: &[], tests_use: &[] },
    // The conformance suite of farside-fabrics runs fabrics against a real node.
    Arrows { package: "farside-fabrics", uses: &["farside-remote"], tests_use: &["farside-node"] },
    Arrows { package: "farside-node", uses: &["farside-remote", "farside-fabrics"], tests_use: &[] },
    Arrows { package: "farside-systems", uses: &["farside-remote"], tests_use: &[] },
    // The tests of farside-systems run protocols over real fabrics and nodes, and in the simulator.
    Arrows {
        package: "farside-systems-tests",
        uses: &[],
        tests_use: &["farside-remote", "farside-fabrics", "farside-node", "farside-systems", "farside-sim"],
    },
    // The simulator runs the real sessions and the real node, and knows no system.
    Arrows {
        package: "farside-sim",
        uses: &["farside-remote", "farside-fabrics", "farside-node"],
        tests_use: &[],
    },
    Arrows {
        package: "farside-trial",
        uses: &["farside-remote", "farside-fabrics", "farside-node", "farside-sim", "farside-systems"],
        tests_use: &[],
    },
    Arrows {
        package: "farside-predict",
        uses: &["farside-remote", "farside-sim", "farside-systems", "farside-bench"],
        tests_use: &[],
    },
    Arrows {
        package: "farside",
        uses: &[
            "farside-remote",
            "farside-fabrics",
            "farside-node",
            "farside-sim",
            "farside-systems",
            "farside-trial",
            "farside-predict",
            "farside-bench",
        ],
        tests_use: &[],
    },
    Arrows {
        package: "farside-bench",
        uses: &["farside-remote", "farside-systems"],
        tests_use: &["farside", "farside-fabrics", "farside-node", "farside-sim", "farside-trial"],
    },
    // Models are built and explored without the rest.
    Arrows { package: "farside-model", uses: &[], tests_use: &[] },
    Arrows { package: "xtask", uses: &[], tests_use: &[] },
];

/// Returns every dependency of a manifest that [`ARROWS`] does not allow.
pub(super) fn findings(path: &str, text: &str) -> Vec<Finding> {
    let manifest: toml::Table = match text.parse() {
        Ok(manifest) => manifest,
        Err(error) => return vec![Finding::new(path, 1, error.to_string(), "write it as TOML")],
    };
    let Some(package) = manifest.get("package").and_then(|package| package.get("name")?.as_str()) else {
        return Vec::new(); // The workspace's own manifest.
    };
    let Some(arrows) = ARROWS.iter().find(|arrows| arrows.package == package) else {
        let remedy = "add it to ARROWS in xtask/src/tidy/manifest.rs, and to ARCHITECTURE.md";
        return vec![Finding::new(path, 1, format!("no rule lists what `{package}` may depend on"), remedy)];
    };
    let mut findings = Vec::new();
    for (dependency, is_for_tests) in ours(&manifest) {
        let is_drawn = dependency == package
            || arrows.uses.contains(&dependency.as_str())
            || is_for_tests && arrows.tests_use.contains(&dependency.as_str());
        if !is_drawn {
            let line =
                text.lines().position(|line| line.trim_start().starts_with(&dependency)).unwrap_or(0) + 1;
            let whose = if is_for_tests { "the tests of " } else { "" };
            let what = format!("{whose}`{package}` must not depend on `{dependency}`");
            let remedy =
                "move the code to a crate that may depend on it, or go through a trait of farside-remote";
            findings.push(Finding::new(path, line, what, remedy));
        }
    }
    findings
}

/// Returns the dependencies on packages of this workspace. Each item is a package, and whether it is a dev-dependency.
fn ours(manifest: &toml::Table) -> Vec<(String, bool)> {
    let targets = manifest.get("target").and_then(|targets| targets.as_table());
    let tables = targets.into_iter().flatten().filter_map(|(_, target)| target.as_table());
    let mut ours = Vec::new();
    for table in tables.chain([manifest]) {
        for (kind, is_for_tests) in
            [("dependencies", false), ("build-dependencies", false), ("dev-dependencies", true)]
        {
            let dependencies = table.get(kind).and_then(|dependencies| dependencies.as_table());
            for (name, value) in dependencies.into_iter().flatten() {
                let package = value.get("package").and_then(|package| package.as_str()).unwrap_or(name);
                if package == "farside" || package.starts_with("farside-") || package == "xtask" {
                    ours.push((package.to_owned(), is_for_tests));
                }
            }
        }
    }
    ours
}

#[cfg(test)]
mod tests {
    use super::super::tests::seen;
    use super::*;

    fn seen_in(package: &str, dependencies: &str) -> Vec<String> {
        seen(&findings("crates/a/Cargo.toml", &format!("[package]\nname = \"{package}\"\n{dependencies}\n")))
    }

    const NOTHING: [&str; 0] = [];

    #[test]
    fn arrows_point_downwards_only() {
        let fabrics = "[dependencies]\nserde = \"1\"\nfarside-fabrics = { workspace = true }";
        assert_eq!(
            seen_in("farside-remote", fabrics),
            ["5: `farside-remote` must not depend on `farside-fabrics`"]
        );
        assert_eq!(
            seen_in("farside-systems", fabrics),
            ["5: `farside-systems` must not depend on `farside-fabrics`"]
        );
        assert_eq!(seen_in("farside-node", fabrics), NOTHING);
        assert_eq!(seen_in("farside", fabrics), NOTHING);
        let systems = "[dependencies]\nfarside-systems.workspace = true";
        assert_eq!(
            seen_in("farside-node", systems),
            ["4: `farside-node` must not depend on `farside-systems`"]
        );
    }

    #[test]
    fn the_tests_of_systems_may_know_fabrics() {
        let tests = "[dev-dependencies]\nfarside-fabrics = { path = \"../fabrics\" }";
        assert_eq!(seen_in("farside-systems-tests", tests), NOTHING);
        assert_eq!(
            seen_in("farside-remote", tests),
            ["4: the tests of `farside-remote` must not depend on `farside-fabrics`"]
        );
        assert_eq!(
            seen_in("farside-systems", tests),
            ["4: the tests of `farside-systems` must not depend on `farside-fabrics`"]
        );
        let itself = "[dev-dependencies]\nfarside-remote = { path = \".\", features = [\"model\"] }";
        assert_eq!(seen_in("farside-remote", itself), NOTHING);
    }

    #[test]
    fn renamed_and_target_specific_dependencies_are_checked() {
        let renamed =
            "[target.'cfg(unix)'.dependencies]\nf = { package = \"farside-fabrics\", path = \"x\" }";
        assert_eq!(
            seen_in("farside-remote", renamed),
            ["1: `farside-remote` must not depend on `farside-fabrics`"]
        );
    }

    #[test]
    fn a_new_crate_needs_a_rule_for_its_dependencies() {
        assert_eq!(seen_in("farside-new", ""), ["1: no rule lists what `farside-new` may depend on"]);
        assert_eq!(seen(&findings("Cargo.toml", "[workspace]\n")), NOTHING);
    }
}
